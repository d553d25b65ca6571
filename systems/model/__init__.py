"""Small real models: Qwen3 dense and MoE, with an engine that serves them deterministically."""

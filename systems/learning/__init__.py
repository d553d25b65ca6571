"""Real policy updates: GRPO on canonical micro-batches."""

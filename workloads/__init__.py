"""What is run: model groups, prompts, judges, length models and the tiny models that really learn."""

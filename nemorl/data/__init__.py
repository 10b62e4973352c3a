"""Tasks, prompts, examples, and how a batch is laid out for training."""

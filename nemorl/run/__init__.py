"""A run from start to end: train, evaluate, record, keep checkpoints, stop."""

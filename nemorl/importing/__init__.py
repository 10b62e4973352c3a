"""Experiment files from the configs of NeMo-RL, verl and TRL; docs/moving_in.md."""

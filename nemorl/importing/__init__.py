"""Experiment files from the configs of NeMo-RL, verl, OpenRLHF and TRL; docs/moving_in.md."""

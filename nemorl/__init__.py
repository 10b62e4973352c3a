"""nemorl: reinforcement-learning post-training for language models, from one laptop core to a GPU cluster."""

__version__ = "0.1.0"

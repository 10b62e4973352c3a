"""Environments, tools and agents of the experiment files in configs/."""

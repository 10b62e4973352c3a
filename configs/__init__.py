"""Experiment files that come with nemorl; `nemorl recipes list` shows them."""

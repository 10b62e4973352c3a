"""Sampling: the turn loop, its records, the rollout worker and the driver's collector."""

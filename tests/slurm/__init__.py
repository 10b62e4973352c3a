"""Tests on a real Slurm, which they start themselves."""

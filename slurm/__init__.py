"""Runs on a Slurm cluster: what submits them, and what starts Ray and the run on the nodes of a job."""

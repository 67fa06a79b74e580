"""Slurm adapter: what the allocation says about this run."""

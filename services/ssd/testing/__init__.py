"""Fakes of the seams, shipped for tests and imported by nothing else."""

"""Benchmarks: modes side by side in one run, on the same weights, prompts and threads.

Belongs here: workloads, figures (each defined once, in ``metrics``), tables. A claim is a ratio
from one run, with its spread.
"""

"""Benchmarks: all modes in one run, with the same weights, prompts and threads.

This package contains workloads, figures (each defined once, in ``metrics``) and tables. A claim is
a ratio from one run, with its spread.
"""

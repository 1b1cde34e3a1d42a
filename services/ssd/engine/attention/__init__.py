"""Attention over gathered entries on CPUs, and over pages on GPUs. Selected at start."""

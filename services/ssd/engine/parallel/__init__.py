"""Tensor parallelism: a model on several ranks, each a process with a part of every layer."""

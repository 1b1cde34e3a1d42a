"""Rounds: which sequences run, their forward pass, their results."""

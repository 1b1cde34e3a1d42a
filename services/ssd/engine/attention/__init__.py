"""Attention over gathered slots: one Protocol, chosen at start."""

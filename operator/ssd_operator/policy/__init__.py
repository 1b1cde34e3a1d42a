"""Decisions: what a pass changes. Pure."""

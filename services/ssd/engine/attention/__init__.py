"""Attention over gathered entries. The backend is selected at start."""

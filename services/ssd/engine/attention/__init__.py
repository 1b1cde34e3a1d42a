"""Attention over gathered slots. The backend is selected at start."""

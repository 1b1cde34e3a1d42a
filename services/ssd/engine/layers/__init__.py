"""Shared layers: a model family is what differs between them."""

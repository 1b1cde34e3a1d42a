"""``ssd distill``: train a draft to make the choices of its target.

This package contains the text, the training loop, the checkpoints and the figures on held-out text.
Models are those of transformers. Nothing that serves imports it.
"""

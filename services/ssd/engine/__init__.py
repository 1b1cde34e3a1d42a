"""A model on a device: it knows no request, no speculation and no wire.

Belongs here: model shapes and weights, layers, attention, the KV cache, the forward passes of
fixed shape, choosing tokens from logits. Does not: what is proposed, accepted or sent.
"""

"""A model on a device, independent of requests, speculation and the network.

This package contains model shapes and weights, layers, attention, the KV cache, forward passes of
fixed shape and the choice of tokens from logits.
"""

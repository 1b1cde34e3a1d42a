"""The KV cache: ownership of blocks (without tensors), and the tensors of keys and values."""

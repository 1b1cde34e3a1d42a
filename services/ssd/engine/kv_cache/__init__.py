"""Where keys and values live: which blocks are whose (no tensors), and the tensors themselves."""

"""Text to token ids and back, chat templates, stop strings. No tensors, no network."""

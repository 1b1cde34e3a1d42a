"""Text to token ids and back, chat templates, stop strings. No tensors, no network."""

__all__ = ["chat_template", "detokenizer", "grammar", "stop", "tokenizer", "tokenizer_config"]

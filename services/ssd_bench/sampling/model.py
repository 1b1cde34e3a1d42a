"""A model of transformers with the cache of one text."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from ssd_bench.sampling.laws import Float32s


class Model:
    """A causal model with the cache of one text."""

    def __init__(self, folder: Path) -> None:
        """Load the model in float32."""
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._cache = DynamicCache(config=self._model.config)

    def begin(self, tokens: Sequence[int]) -> None:
        """Forget the text, and store another one."""
        self._cache = DynamicCache(config=self._model.config)
        self.run(tokens)

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> Float32s:
        """Store tokens after the text; returns the logits of each, float32 [len(tokens), V]."""
        found = self._model(torch.tensor([tokens]), past_key_values=self._cache, use_cache=True)
        logits_TV: Float32s = found.logits[0].float().numpy()
        return logits_TV

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of the text."""
        num_more = self._cache.get_seq_length() - length
        if num_more:
            self._cache.crop(-num_more)

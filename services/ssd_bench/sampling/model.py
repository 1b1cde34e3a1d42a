"""A model of transformers with the cache of one text."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from ssd_bench.sampling.laws import Float32s


class Model:
    """A causal model with the cache of one text."""

    def __init__(self, folder: Path) -> None:
        """Load the model in float32."""
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._cache = DynamicCache(config=self._model.config)
        # transformers 5.24 has renamed the argument.
        names = signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def begin(self, tokens: Sequence[int]) -> None:
        """Store another text in place of the present one."""
        self._cache = DynamicCache(config=self._model.config)
        self.run(tokens)

    @torch.inference_mode()
    def run(self, tokens: Sequence[int]) -> Float32s:
        """Store tokens after the text; returns the logits of each, float32 [len(tokens), V]."""
        more: dict[str, Any] = {self._cache_name: self._cache}
        found = self._model(torch.tensor([tokens]), use_cache=True, **more)
        logits_TV: Float32s = found.logits[0].float().numpy()
        return logits_TV

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of the text."""
        num_more = self._cache.get_seq_length() - length
        if num_more:
            self._cache.crop(-num_more)

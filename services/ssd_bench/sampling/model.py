"""Models of transformers, with the KV entries of one batch of texts."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from ssd.engine.config import ModelConfig
from ssd.engine.models.weights import open_weights
from ssd_bench.sampling.laws import Float32s


def load_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Return the model of a folder, without a progress bar of its own.

    Raises:
        SetupError: a target or draft would refuse the model or its weights.
    """
    _check(folder, dtype)
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.to(device)


def _check(folder: Path, dtype: torch.dtype) -> None:
    """Read all weights as a target does; none stays in memory.

    Transformers draws missing tensors at random, and accepts all values.
    """
    weights = open_weights(folder, ModelConfig.from_folder(folder), dtype, "cpu", lambda _: None)
    for _ in weights.layers:
        pass


class Model:
    """A causal model with the KV entries of one batch of texts."""

    def __init__(self, model: Any, num_token_ids: int | None = None) -> None:
        """Wrap a model of transformers; ids from ``num_token_ids`` on are padding, left out."""
        self._model = model
        self._num_token_ids = num_token_ids
        self._cache = DynamicCache(config=model.config)
        # transformers 5.24 has renamed the argument.
        names = signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def clear(self) -> None:
        """Remove all texts."""
        self._cache = DynamicCache(config=self._model.config)

    def begin(self, tokens: Sequence[int]) -> None:
        """Store another text in place of the present one."""
        self.clear()
        self.run(tokens)

    def run(self, tokens: Sequence[int]) -> Float32s:
        """Store tokens after the text; returns the logits of each, float32 [len(tokens), V]."""
        logits_TV: Float32s = self.extend(torch.tensor([tokens]))[0].cpu().numpy()
        return logits_TV

    @torch.inference_mode()
    def extend(self, tokens_BS: Tensor, num_last: int = 0) -> Tensor:
        """Store tokens after each text of a batch.

        Returns:
            Logits of the last ``num_last`` tokens, or of all if it is 0: float32 [B, S, V].
        """
        more: dict[str, Any] = {self._cache_name: self._cache, "logits_to_keep": num_last}
        output = self._model(tokens_BS.to(self._model.device), use_cache=True, **more)
        logits_BSV: Tensor = output.logits[..., : self._num_token_ids].float()
        return logits_BSV

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens of the text."""
        num_more = self._cache.get_seq_length() - length
        if num_more:
            self._cache.crop(-num_more)

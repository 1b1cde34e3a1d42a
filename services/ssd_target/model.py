"""The model of this target: its folder, tokenizer and engine shapes, before it is loaded."""

from dataclasses import dataclass
from pathlib import Path

from ssd.engine.config import EngineConfig
from ssd.ports import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model folder on this machine, and how the engine will run it."""

    folder: Path
    tokenizer: Tokenizer
    engine: EngineConfig

    @property
    def num_token_ids(self) -> int:
        """Number of token ids that a prompt can hold and the model can choose."""
        return self.engine.num_token_ids or self.tokenizer.vocab_size

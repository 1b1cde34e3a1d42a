"""The pair's shared tokenizer: byte-level BPE, trained on the corpus."""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tools.distill.model import END_OF_TEXT, END_OF_TEXT_ID, write_json
from torch import Tensor

from ssd.demo.corpus import Module


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train a byte-level BPE; id 0 is the end of text, and decoding restores any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "add_eos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "eos_token": END_OF_TEXT,
            "model_max_length": 2048,
        },
    )


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load a folder written by ``save_tokenizer``."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_modules(tokenizer: Tokenizer, modules: Iterable[Module]) -> Tensor:
    """Return all modules as one int64 stream, [num_tokens], an end of text before each."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([module.text for module in modules]):
        ids.append(END_OF_TEXT_ID)
        ids.extend(encoding.ids)
    return torch.tensor(ids, dtype=torch.int64)

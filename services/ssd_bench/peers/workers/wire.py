"""Lines of JSON between ``ssd bench peers`` and an engine in another environment.

``python wire.py NAME`` runs the module NAME beside this file. The first line to it is a ``Config``;
it answers ``{"version": ...}`` when it is ready. Each later line is a ``Batch``, answered with a
``Completion``.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NotRequired, TextIO, TypedDict


class Config(TypedDict):
    """What a worker loads."""

    target: str
    """Folder in Hugging Face's layout."""
    draft: NotRequired[str]
    """The same; absent: plain decoding."""
    lookahead: NotRequired[int]
    """Tokens of a proposal."""
    has_own_device: NotRequired[bool]
    """Whether the draft has a device of its own: SSD of the engine itself."""
    drafts: NotRequired[list[str]]
    """Addresses of this product's draft processes."""
    ngrams: NotRequired[bool]
    """Proposals are n-grams of the text."""
    threads: int
    dtype: str
    """``float32``, ``bfloat16``, ``int8`` or ``int4``."""
    batch: int
    """Largest number of prompts at a time."""
    length: int
    """Largest number of tokens of a sequence."""
    scratch: str
    """Folder for converted models, which other runs reuse."""


class Batch(TypedDict):
    """Prompts that are completed at the same time."""

    prompts: list[list[int]]
    """Token ids, all lists of one length."""
    max_tokens: int
    """New tokens; the end-of-text token does not end a text."""
    temperature: float
    seed: int


class Completion(TypedDict):
    """A completed batch."""

    tokens: Sequence[Sequence[int]]
    """New tokens of each prompt."""
    hits: NotRequired[int]
    looked_up: NotRequired[int]
    """Rounds that needed a table of this product's draft processes; the hits are a part."""


Complete = Callable[[Batch], Completion]


Load = Callable[[Config], tuple[str, Complete]]
"""Loads an engine; returns its version, and what completes a batch."""


def serve(load: Load) -> None:
    """Load an engine and answer lines until the input ends.

    The engine's own output goes to standard error: many libraries print.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    version, complete = load(json.loads(sys.stdin.readline()))
    _put(answers, {"version": version})
    for line in sys.stdin:
        completion = complete(json.loads(line))
        tokens = [list(map(int, ids)) for ids in completion["tokens"]]
        _put(answers, {**completion, "tokens": tokens})


def _put(stream: TextIO, value: dict[str, Any]) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


if __name__ == "__main__":
    serve(import_module(sys.argv[1]).load)

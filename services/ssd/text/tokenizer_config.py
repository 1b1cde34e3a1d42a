"""The files beside ``tokenizer.json``: names of special tokens, and tokens that were added later.

They are read as transformers reads them. Newer folders have all of it in ``tokenizer_config.json``.
Older ones have ``special_tokens_map.json`` and ``added_tokens.json``, which only count without
``added_tokens_decoder`` in the first file.
"""

import json
from collections.abc import Mapping, Set
from operator import index
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from ssd.errors import TokenizerError
from ssd.types import TokenId

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
OPTIONAL_FILES = (CONFIG, SPECIAL_TOKENS, ADDED_TOKENS)
_DECODER = "added_tokens_decoder"
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no such file.

    Raises:
        TokenizerError: the file has no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise TokenizerError(f"{path}: not a JSON object")
    return document


def read_config(folder: Path) -> dict[str, Any]:
    """Return the configuration of a tokenizer, with the special tokens of older folders.

    Raises:
        TokenizerError: a file has no JSON object.
    """
    config = read_object(folder / CONFIG)
    return config if _DECODER in config else read_object(folder / SPECIAL_TOKENS) | config


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by name, such as ``bos_token``."""
    named = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[TokenId, AddedToken]:
    """Return the tokens that a configuration adds to ``tokenizer.json``, by id.

    Raises:
        TokenizerError: a token or an id is malformed.
    """
    path = folder / (CONFIG if _DECODER in config else ADDED_TOKENS)
    try:
        more = map(_content, config.get("additional_special_tokens") or ())
        special = {*special_tokens(config).values(), *more}
        if _DECODER in config:
            entries = config[_DECODER].items()
            return {int(number): _token(entry, special) for number, entry in entries}
        return {
            index(number): AddedToken(text, special=text in special, normalized=text not in special)
            for text, number in read_object(path).items()
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TokenizerError(f"{path}: malformed added tokens: {error}") from error


def _token(entry: Mapping[str, Any], special: Set[str | None]) -> AddedToken:
    text = entry["content"]
    flags = {name: entry[name] for name in _FLAGS if name in entry}
    return AddedToken(text, **flags, special=entry.get("special", False) or text in special)


def _content(value: object) -> str | None:
    """Return the text of a token, which is written as a text or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None

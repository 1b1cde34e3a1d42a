"""The files beside ``tokenizer.json``: names of special tokens, and tokens that were added later.

Newer folders have all of it in ``tokenizer_config.json``. Older ones have
``special_tokens_map.json`` and ``added_tokens.json``, which only count without
``added_tokens_decoder`` in the first file. Values of ``special_tokens_map.json`` then replace those
of the first file. ``ssd.text.tokenizer`` adds the tokens.
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
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


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
    return config if _DECODER in config else config | read_object(folder / SPECIAL_TOKENS)


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by name, such as ``bos_token``."""
    named = {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: text for name, text in named.items() if text is not None}


def special_texts(folder: Path, config: Mapping[str, Any]) -> set[str]:
    """Return the texts of all special tokens of a configuration.

    Raises:
        TokenizerError: the list of those without a name is malformed.
    """
    more = config.get("additional_special_tokens") or []
    if not isinstance(more, list):
        raise TokenizerError(f"{folder}: additional_special_tokens must be a list, not {more!r}")
    texts = map(_content, more)
    return {*special_tokens(config).values(), *(text for text in texts if text is not None)}


def added_tokens(
    folder: Path,
    config: Mapping[str, Any],
    special: Set[str],
    there: Mapping[str, AddedToken],
) -> dict[TokenId, AddedToken]:
    """Return the added tokens of a configuration, by id.

    Args:
        folder: the folder of the tokenizer.
        config: its configuration.
        special: texts of special tokens.
        there: added tokens of ``tokenizer.json`` by text. They have their flags from it if the
            configuration has none, as ``added_tokens.json``.

    Raises:
        TokenizerError: a token or an id is malformed.
    """
    path = folder / (CONFIG if _DECODER in config else ADDED_TOKENS)
    try:
        if _DECODER in config:
            return {int(number): _token(entry) for number, entry in config[_DECODER].items()}
        return {
            index(number): there.get(text) or AddedToken(text, special=text in special)
            for text, number in read_object(path).items()
        }
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise TokenizerError(f"{path}: malformed added tokens: {error}") from error


def _token(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(entry["content"], **{name: entry[name] for name in _FLAGS if name in entry})


def _content(value: object) -> str | None:
    """Return the text of a token, which is written as a text or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None

"""Tokenizers of Hugging Face folders."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from ssd.errors import TokenizerError
from ssd.observability.log import get_logger
from ssd.text.detokenizer import REPLACEMENT
from ssd.text.token_length import longest_token_bytes
from ssd.text.tokenizer_config import (
    added_tokens,
    read_config,
    read_object,
    special_texts,
    special_tokens,
)
from ssd.types import TokenId

_log = get_logger(__name__)

_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""A token of one byte in vocabularies with byte fallback."""
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(sorted({*range(256)} - {*_VISIBLE}))
}
"""Bytes of the characters of byte-level vocabularies: visible ones are themselves."""
CONFIGS = ("generation_config.json", "config.json")
"""Files with the ids that end a text, first the one that transformers prefers."""


class HFTokenizer:
    """A ``tokenizer.json`` with the ids that end a text. Any thread."""

    def __init__(self, library: LibraryTokenizer, eos_token_ids: frozenset[TokenId]) -> None:
        self._library = library
        self.eos_token_ids = eos_token_ids
        self._bytes: dict[TokenId, bytes] = {}

    @cached_property
    def vocab_size(self) -> int:
        """Token ids are 0..vocab_size - 1; ids that the vocabulary skips count too."""
        return 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over the sorted (token, id) list and the special ids, hexadecimal."""
        vocabulary = sorted(self._library.get_vocab(with_added_tokens=True).items())
        special = sorted(self._special_names)
        payload = json.dumps([vocabulary, special], ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(payload.encode()).hexdigest()

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """Largest number of bytes of text of one token; None if it is not limited."""
        return longest_token_bytes(json.loads(self.definition))

    @property
    def definition(self) -> str:
        """Content of its ``tokenizer.json``, which takes up to a second to write."""
        return self._library.to_str()

    def encode(self, text: str, *, has_prefix: bool = False) -> list[TokenId]:
        """Return the ids of a text; see ``ssd.ports.Tokenizer``.

        Other threads can run: ``encode`` of the library holds the interpreter lock for the whole
        text, 7 s for 4 MiB. A batch without offsets holds it for 0.1 s, to make the list.
        """
        (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=not has_prefix)
        ids: list[TokenId] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        """Return the text of ids, without special tokens; incomplete characters become U+FFFD."""
        return self._library.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: TokenId) -> str:
        """Return the text of one token inside a text; see ``ssd.ports.Tokenizer``."""
        text = self.decode([token_id])
        if REPLACEMENT in text:
            return text
        # Decoders of SentencePiece remove a space only from the first token.
        return self.decode([token_id, token_id])[len(text) :]

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Return the UTF-8 of one token, also of a part of a character; see ``ports``."""
        found = self._bytes.get(token_id)
        if found is None:
            # Each token of each text needs it, and the library takes microseconds.
            found = self._bytes[token_id] = self._read_bytes(token_id)
        return found

    def _read_bytes(self, token_id: TokenId) -> bytes:
        text = self.token_text(token_id)
        piece = self._library.id_to_token(token_id)
        if REPLACEMENT not in text or piece is None:
            return text.encode()
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(match[1])
        if not _BYTES.keys() >= {*piece}:
            return text.encode()
        return bytes(_BYTES[character] for character in piece)

    def special_name(self, token_id: TokenId) -> str:
        """Return the name of a special token; see ``ssd.ports.Tokenizer``."""
        return self._special_names.get(token_id, "")

    @cached_property
    def _special_names(self) -> dict[TokenId, str]:
        added: dict[int, AddedToken] = self._library.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}


def load_tokenizer(folder: Path) -> HFTokenizer:
    """Read the tokenizer of a model folder.

    Raises:
        TokenizerError: there is none, or it cannot be read.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{folder}: no tokenizer.json in this folder")
    try:
        library = LibraryTokenizer.from_str(path.read_text(encoding="utf-8"))
    # The library raises Exception for malformed files.
    except Exception as error:
        raise TokenizerError(f"{path}: not a tokenizer: {error}") from error
    # Prompts are neither truncated nor padded, also if the file contains such settings.
    library.no_truncation()
    library.no_padding()
    config = read_config(folder)
    _add(folder, library, config)
    end: int | None = library.token_to_id(special_tokens(config).get("eos_token", ""))
    ends = _eos_token_ids(folder)
    return HFTokenizer(library, ends if end is None else ends | {end})


def _add(folder: Path, library: LibraryTokenizer, config: Mapping[str, Any]) -> None:
    """Add tokens and flags that only the configuration has, as transformers does.

    A token of the library keeps its id. *Not so in transformers*: a token without an embedding is
    not added, nor a special token that has no id in any file. A name alone, without an entry of the
    configuration, does not make an added token of the library special.
    """
    there = {token.content: token for token in library.get_added_tokens_decoder().values()}
    # The library omits a token from texts that was special once, whatever its flags are later.
    special = special_texts(folder, config) | {
        text for text, token in there.items() if token.special
    }
    named = set(special_tokens(config).values())
    limit = read_object(folder / "config.json").get("vocab_size")
    new: dict[TokenId, AddedToken] = {}
    changed = []
    for number, token in sorted(added_tokens(folder, config, special, there).items()):
        text = token.content
        found: int | None = library.token_to_id(text)
        if found is None and type(limit) is int and number >= limit:
            # With such tokens, a target and a draft would have different tokenizers.
            _log.warning("added_token_without_embedding", token=text, id=number, vocab_size=limit)
            continue
        if found is None:
            new[number] = token
        elif found != number:
            _log.warning("added_token_has_other_id", token=text, id=found, configured=number)
        if token != there.get(text) or (text in named and not token.special):
            token.special = token.special or text in special
            changed.append(token)
    # Tokens of the vocabulary can be special without an entry of their own.
    plain = sorted(special - there.keys() - {token.content for token in changed})
    changed += [
        AddedToken(text, special=True) for text in plain if library.token_to_id(text) is not None
    ]
    library.add_tokens(changed)
    for number, token in new.items():
        if (found := library.token_to_id(token.content)) != number:
            raise TokenizerError(
                f"{folder}: the added token {token.content!r} has id {number} in the configuration "
                f"of the tokenizer, and {found} with tokenizer.json; correct one of them"
            )


def _eos_token_ids(folder: Path) -> frozenset[TokenId]:
    """Return the ids of the first file that has some."""
    for name in CONFIGS:
        value = read_object(folder / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(token_id) is int for token_id in ids):
            raise TokenizerError(f"{folder / name}: eos_token_id must be an id or a list of ids")
        if ids:
            return frozenset(ids)
    return frozenset()

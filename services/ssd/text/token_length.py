"""The longest text of one token, from the file of a tokenizer.

A prompt longer than this length times the largest number of tokens is refused before it is
tokenised. Lengths are UTF-8 bytes of the received text, not characters: a byte-level token is a
sequence of bytes and can contain a part of a character.

A tokenizer has a longest text only if its tokens represent every part of a text. Many tokenizers
have none. They remove white space or replace text by a regular expression. They use one token for
any unknown word, or have added tokens that include the white space around them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

NORMAL_FORM_SHRINKAGE = 4
"""Largest factor by which a Unicode normal form shortens a text. The largest that occurs is 3.5
for NFC (U+1FBE U+0308 U+0301, 7 bytes, becomes U+0390 of 2) and 4 for NFKC and NFKD."""
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_LENGTHENING = ("Prepend", "ByteLevel")
_KEEPING = ("ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts")
_SPLITTING = ("Split", "Punctuation")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))

Part = Mapping[str, Any]


def longest_token_bytes(tokenizer: Part) -> int | None:
    """Return the largest number of bytes of text of one token; None if it is not limited.

    Args:
        tokenizer: the document of a ``tokenizer.json``.
    """
    added = tokenizer.get("added_tokens") or ()
    lengths = _piece_lengths(tokenizer)
    shrinkage = _shrinkage(tokenizer)
    if (
        lengths is None
        or shrinkage is None
        or any(token["lstrip"] or token["rstrip"] for token in added)
        or not all(_keeps_all(part) for part in _parts(tokenizer.get("pre_tokenizer")))
    ):
        return None
    return shrinkage * max(*lengths, *(len(token["content"].encode()) for token in added), 1)


def _parts(part: Part | None) -> Iterator[Part]:
    """Yield the parts of a normalizer or pre-tokenizer, sequences flattened."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _parts(inner)


def _shrinkage(tokenizer: Part) -> int | None:
    """Return the largest factor by which the normalizer shortens a text; None if not limited."""
    shrinkage = 1
    for part in _parts(tokenizer.get("normalizer")):
        if part["type"] in _NORMAL_FORMS:
            shrinkage *= NORMAL_FORM_SHRINKAGE
        elif part["type"] not in _LENGTHENING and not _replaces_by_more(part):
            return None
    return shrinkage


def _replaces_by_more(part: Part) -> bool:
    """Return whether a part replaces a string by one at least as long (a space by U+2581)."""
    if part["type"] != "Replace" or "String" not in part["pattern"]:
        return False
    return len(part["content"].encode()) >= len(part["pattern"]["String"].encode())


def _keeps_all(part: Part) -> bool:
    if part["type"] in _SPLITTING:
        return bool(part["behavior"] != "Removed")
    return part["type"] in _KEEPING


def _piece_lengths(tokenizer: Part) -> list[int] | None:
    """Return the bytes of each token of the vocabulary; None if a token can be any text."""
    model = tokenizer["model"]
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] not in {"BPE", "Unigram"} or any(model.get(affix) for affix in affixes):
        return None
    vocabulary = model["vocab"]
    pieces = [entry if isinstance(entry, str) else entry[0] for entry in vocabulary]
    parts = (*_parts(tokenizer.get("normalizer")), *_parts(tokenizer.get("pre_tokenizer")))
    if any(part["type"] == "ByteLevel" for part in parts):
        # One character of a piece is one byte of the text.
        return [len(piece) for piece in pieces] if {*ByteLevel.alphabet()} <= {*pieces} else None
    if model.get("byte_fallback") and {*_BYTES} <= {*pieces}:
        return [len(piece.encode()) for piece in pieces]
    return None

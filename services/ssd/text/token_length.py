"""The longest text that one token can stand for, from a tokenizer's own file.

A prompt that is longer than this, times the tokens that a sequence may have, cannot fit, and is
refused before it is tokenised. Lengths are bytes of UTF-8 of the text as it was sent: characters
are no measure, since a byte-level token is a run of bytes and may hold a part of a character.

A tokenizer has such a length only if nothing of a text gets lost on its way to the tokens. Many
have none: those that drop or strip white space, replace by an expression, put one token in the
place of any unknown word, or have added tokens that take the white space around them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

NORMAL_FORM_SHRINKAGE = 4
"""How many times shorter a Unicode normal form makes a text at most. The most that occurs is 3.5
for NFC (U+1FBE U+0308 U+0301, 7 bytes, becomes U+0390 of 2) and 4 for NFKC and NFKD."""
_NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_LENGTHENING = ("Prepend", "ByteLevel")
_KEEPING = ("ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts")
_SPLITTING = ("Split", "Punctuation")
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))

Part = Mapping[str, Any]


def longest_token_bytes(tokenizer: Part) -> int | None:
    """Bytes of text that one token stands for at most; None where no length is known.

    Args:
        tokenizer: the document of a ``tokenizer.json``.
    """
    added = tokenizer.get("added_tokens") or ()
    lengths = _piece_lengths(tokenizer)
    shrinkage = _shrinkage(tokenizer)
    if (
        lengths is None
        or shrinkage is None
        or any(each["lstrip"] or each["rstrip"] for each in added)
        or not all(_keeps_all(each) for each in _parts(tokenizer.get("pre_tokenizer")))
    ):
        return None
    return shrinkage * max(*lengths, *(len(each["content"].encode()) for each in added), 1)


def _parts(part: Part | None) -> Iterator[Part]:
    """A normalizer or pre-tokenizer, sequences laid out."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for inner in part.get("normalizers") or part.get("pretokenizers") or ():
        yield from _parts(inner)


def _shrinkage(tokenizer: Part) -> int | None:
    """How many times shorter the normalizer makes a text at most."""
    shrinkage = 1
    for part in _parts(tokenizer.get("normalizer")):
        if part["type"] in _NORMAL_FORMS:
            shrinkage *= NORMAL_FORM_SHRINKAGE
        elif part["type"] not in _LENGTHENING and not _replaces_by_more(part):
            return None
    return shrinkage


def _replaces_by_more(part: Part) -> bool:
    """Such as a space by U+2581."""
    if part["type"] != "Replace" or "String" not in part["pattern"]:
        return False
    return len(part["content"].encode()) >= len(part["pattern"]["String"].encode())


def _keeps_all(part: Part) -> bool:
    if part["type"] in _SPLITTING:
        return bool(part["behavior"] != "Removed")
    return part["type"] in _KEEPING


def _piece_lengths(tokenizer: Part) -> list[int] | None:
    """Bytes of each token of the vocabulary; None where a token can stand for any text."""
    model = tokenizer["model"]
    affixes = ("continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] not in {"BPE", "Unigram"} or any(model.get(affix) for affix in affixes):
        return None
    vocabulary = model["vocab"]
    pieces = [each if isinstance(each, str) else each[0] for each in vocabulary]
    parts = (*_parts(tokenizer.get("normalizer")), *_parts(tokenizer.get("pre_tokenizer")))
    if any(part["type"] == "ByteLevel" for part in parts):
        # One character of a piece is one byte of the text.
        return [len(piece) for piece in pieces] if {*ByteLevel.alphabet()} <= {*pieces} else None
    if model.get("byte_fallback") and {*_BYTES} <= {*pieces}:
        return [len(piece.encode()) for piece in pieces]
    return None

"""The largest length of a token: which tokenizers have one, and that it is a bound."""

import json
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from ssd import demo
from ssd.text.token_length import NORMAL_FORM_SHRINKAGE, longest_token_bytes

LONGEST = "abcdefgh"
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level() -> Tokenizer:
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [LONGEST[:end] for end in range(2, len(LONGEST) + 1)]
    merges = [(LONGEST[:end], LONGEST[end]) for end in range(1, len(LONGEST))]
    made = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def with_fallback() -> Tokenizer:
    pieces = FALLBACK | {"a": 256, "\u2581": 257, "\u2581a": 258}
    made = Tokenizer(models.BPE(pieces, [("\u2581", "a")], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    return made


def length(made: Tokenizer) -> int | None:
    return longest_token_bytes(json.loads(made.to_str()))


def test_a_byte_level_token_is_as_many_bytes_as_it_has_characters() -> None:
    assert length(byte_level()) == len(LONGEST)


def test_byte_fallback_tokens_count_with_their_spelling() -> None:
    assert length(with_fallback()) == len("<0x00>")


def test_an_added_token_counts_with_its_bytes() -> None:
    made = byte_level()
    made.add_special_tokens(["<|é|>"])
    assert length(made) == len(LONGEST)
    made.add_tokens(["é" * 10])
    assert length(made) == 20


def test_the_embedded_model_has_a_length(tmp_path: Path) -> None:
    document = json.loads((demo.folder("target") / "tokenizer.json").read_text())
    assert longest_token_bytes(document) == 45


def altered(change: Callable[[Tokenizer], None]) -> Tokenizer:
    made = byte_level()
    change(made)
    return made


def set_normalizer(*parts: Any) -> Callable[[Tokenizer], None]:
    def change(made: Tokenizer) -> None:
        made.normalizer = normalizers.Sequence(list(parts))

    return change


def set_splitter(part: Any) -> Callable[[Tokenizer], None]:
    def change(made: Tokenizer) -> None:
        made.pre_tokenizer = pre_tokenizers.Sequence([part, made.pre_tokenizer])

    return change


def add_greedy_token(made: Tokenizer) -> None:
    made.add_tokens([AddedToken("<x>", rstrip=True)])


LOSING: Mapping[str, Callable[[Tokenizer], None]] = {
    "strip": set_normalizer(normalizers.Strip()),
    "lowercase": set_normalizer(normalizers.NFC(), normalizers.Lowercase()),
    "expression": set_normalizer(normalizers.Replace(Regex(" +"), " ")),
    "shorter": set_normalizer(normalizers.Replace("  ", " ")),
    "white space": set_splitter(pre_tokenizers.WhitespaceSplit()),
    "removed": set_splitter(pre_tokenizers.Split(" ", "removed")),
    "greedy token": add_greedy_token,
    "word pieces": lambda made: setattr(made, "model", models.WordPiece({"[UNK]": 0})),
    "bytes missing": lambda made: setattr(made, "model", models.BPE({"a": 0}, [])),
}


@pytest.mark.parametrize("change", LOSING.values(), ids=LOSING.keys())
def test_a_tokenizer_that_can_lose_text_has_no_length(change: Callable[[Tokenizer], None]) -> None:
    assert length(altered(change)) is None


@pytest.mark.parametrize(
    "part",
    [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.Digits()],
    ids=["split", "digits"],
)
def test_splitting_loses_no_text(part: Any) -> None:
    assert length(altered(set_splitter(part))) == len(LONGEST)


def test_no_character_shrinks_by_more_than_the_constant() -> None:
    # All others are their own normal form.
    syllables = range(0xAC00, 0xD7A4)
    characters = [
        character
        for character in map(chr, range(0x110000))
        if unicodedata.decomposition(character) or ord(character) in syllables
    ]
    forms: tuple[tuple[Literal["NFC", "NFKC"], Literal["NFD", "NFKD"]], ...]
    forms = (("NFC", "NFD"), ("NFKC", "NFKD"))
    for form, parts in forms:
        longest: dict[str, int] = {}
        for character in characters:
            whole = unicodedata.normalize(parts, character)
            num_bytes = len(character.encode())
            assert num_bytes <= NORMAL_FORM_SHRINKAGE * len(whole.encode())
            longest[whole] = max(longest.get(whole, 0), num_bytes)
        for character in characters:
            if unicodedata.normalize(form, character) == character:
                pieces = unicodedata.normalize(parts, character)
                before = sum(longest.get(each, len(each.encode())) for each in pieces)
                assert before <= NORMAL_FORM_SHRINKAGE * len(character.encode())


TEXTS = st.text(st.sampled_from(f"{LONGEST} é\u212b\u1fbe\u0308\u0301😀\n"), min_size=1)


@given(TEXTS)
def test_the_length_is_a_lower_bound_of_the_number_of_tokens(text: str) -> None:
    composing = altered(set_normalizer(normalizers.NFC()))
    for made in (byte_level(), with_fallback(), composing):
        longest = length(made)
        assert longest is not None
        assert len(made.encode(text).ids) * longest >= len(text.encode())

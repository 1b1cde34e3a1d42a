from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd.ports import Tokenizer
from ssd.testing.tokenizer import ByteTokenizer
from ssd.text.detokenizer import IncrementalDetokenizer
from ssd.types import TokenId

MALFORMED = [*range(0x61, 0x64), 0x80, 0xA9, 0xC3, 0xE2, 0xF0, 0x9F, 256]
"""Letters, bytes that continue, bytes that begin two, three and four, and the end of text."""


class WordTokenizer(ByteTokenizer):
    """Words with a space before each, which a text does not begin with."""

    def decode(self, token_ids: Sequence[TokenId]) -> str:
        return "".join(f" w{each}" for each in token_ids).removeprefix(" ")

    def token_bytes(self, token_id: TokenId) -> bytes:
        return f" w{token_id}".encode()


def run(tokenizer: Tokenizer, pushes: list[list[TokenId]]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(ids) for ids in pushes), detokenizer.finish()]


def cut(ids: list[TokenId], sizes: list[int]) -> list[list[TokenId]]:
    pushes = []
    for size in sizes:
        pushes.append(ids[:size])
        ids = ids[size:]
    return [*pushes, ids]


def test_text_is_returned_as_soon_as_its_characters_are_complete() -> None:
    smile = list("😀".encode())
    assert run(ByteTokenizer(), [[97], *([each] for each in smile), [98]]) == [
        "a", "", "", "", "😀", "b", "",
    ]  # fmt: skip


def test_an_unfinished_character_becomes_the_replacement_character_at_the_end() -> None:
    assert run(ByteTokenizer(), [[97, 0xE2, 0x82]]) == ["a", "\ufffd"]


def test_ids_without_text_give_none() -> None:
    assert run(ByteTokenizer(), [[256], [], [97, 256]]) == ["", "", "a", ""]


def test_the_special_start_of_a_text_is_decoded_once() -> None:
    assert run(WordTokenizer(), [[1], [2, 3], [4]]) == ["w1", " w2 w3", " w4", ""]


@example("a\ufffdb", [1] * 5)
@given(st.text(max_size=40), st.lists(st.integers(0, 6), max_size=30))
def test_pieces_are_complete_characters_and_add_up_to_the_text(text: str, sizes: list[int]) -> None:
    ids = list(text.encode())
    pieces = run(ByteTokenizer(), cut(ids, sizes))
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")


@given(st.lists(st.sampled_from(MALFORMED), max_size=80), st.lists(st.integers(0, 4), max_size=60))
def test_pieces_of_malformed_bytes_equal_the_text_decoded_at_once(
    ids: list[TokenId], sizes: list[int]
) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(run(tokenizer, cut(ids, sizes))) == tokenizer.decode(ids)


@pytest.mark.parametrize("tail", ["é", "€", "😀"])
def test_a_character_after_many_malformed_bytes_is_complete(tail: str) -> None:
    ids = [*[0x80] * 40, *tail.encode()]
    tokenizer = ByteTokenizer()
    pieces = run(tokenizer, [[each] for each in ids])
    assert "".join(pieces) == tokenizer.decode(ids)
    assert sum(map(len, pieces[:40])) > 20

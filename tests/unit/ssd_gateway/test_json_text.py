"""JSON that is held while it arrives."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_gateway.json_text import BLOCK_BYTES, HeldJson, HeldList, HeldText, blocks, encoded, pieces

ITEMS = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(st.lists(st.text()), st.lists(ITEMS))
def test_held_json_is_that_of_the_complete_value(parts: list[str], items: list[object]) -> None:
    text, many = HeldText(), HeldList()
    taken = sum(text.add(part) for part in parts) + sum(many.extend([item]) for item in items)
    value = {"a": [text, {"b": many}, [], {}], "c": None}
    whole = {"a": ["".join(parts), {"b": items}, [], {}], "c": None}
    assert b"".join(pieces(value)) == b"".join(blocks(value)) == encoded(whole)
    assert json.loads(encoded(whole)) == whole
    assert taken == len(text) + len(many)


def test_blocks_of_held_json_are_neither_large_nor_many() -> None:
    text, many = HeldText(), HeldList()
    text.add("é" * BLOCK_BYTES)
    many.extend(range(BLOCK_BYTES))
    held: list[HeldJson] = [text, many]
    found = list(blocks({str(number): held for number in range(3)}))
    assert max(map(len, found)) <= BLOCK_BYTES
    assert len(found) < 2 * sum(map(len, found)) / BLOCK_BYTES


@pytest.mark.parametrize("end", ["\x0b", "\x1c", "\x85", "\u2028", "\u2029"])
def test_json_is_one_line_for_readers_that_divide_texts_at_any_line_end(end: str) -> None:
    value = {"a": [f"é{end}b"], end: 1}
    text = encoded(value).decode()
    assert len(text.splitlines()) == 1
    assert json.loads(text) == value
    assert "é" in text

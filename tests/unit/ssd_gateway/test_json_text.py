"""JSON that is held while it arrives."""

import json

from hypothesis import given
from hypothesis import strategies as st

from ssd_gateway.json_text import BLOCK_BYTES, HeldJson, HeldList, HeldText, blocks, pieces

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
    assert (
        b"".join(pieces(value))
        == b"".join(blocks(value))
        == json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    )
    assert taken == len(text) + len(many)


def test_blocks_of_held_json_are_neither_large_nor_many() -> None:
    text, many = HeldText(), HeldList()
    text.add("é" * BLOCK_BYTES)
    many.extend(range(BLOCK_BYTES))
    held: list[HeldJson] = [text, many]
    found = list(blocks({str(number): held for number in range(3)}))
    assert max(map(len, found)) <= BLOCK_BYTES
    assert len(found) < 2 * sum(map(len, found)) / BLOCK_BYTES

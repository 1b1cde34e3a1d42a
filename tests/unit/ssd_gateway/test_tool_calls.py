"""Calls of tools in texts, however the texts are divided."""

from collections.abc import Callable, Iterable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd_gateway import tool_calls
from ssd_gateway.tool_calls import (
    CallPart,
    HermesReader,
    ListReader,
    LlamaReader,
    NamedReader,
    Parts,
    TextReader,
)

ARGUMENTS = '{"a": "}\\"{\\\\", "b": [1, {"c": "</tool_call>"}], "é": null}'
ONE = '{"name": "f", "arguments": ' + ARGUMENTS + "}"
TWO = '{"name": "g", "parameters": {}}'
LATE = '{"arguments": {"x": 1}, "name": "late"}'
HALF_NAME = r'<tool_call>{"name": "\ud800", "arguments": {}}</tool_call>'
SPACED = '{"x":1,  "y":1.0e2}'
HALF = r'{"x": "\ud83d"}'
WRONG = '{"a": tru, b: [1}, "c": \'}'
TYPED = '{"type": "function", "name": "typed", "parameters": {"y": 2}}'
F, G = ("f", ARGUMENTS), ("g", "{}")
HERMES: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call < here", "no call < here", []),
    ("", "", []),
    (" \n", " \n", []),
    (f"<tool_call>\n{ONE}\n</tool_call>", "", [F]),
    (f"<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}\n</tool_call>\n", "", [F, G]),
    (f"Sure.\n<tool_call>\n{ONE}\n</tool_call> Done.", "Sure.\n Done.", [F]),
    (f"<think>\n\n</think>\n\n<tool_call>{TWO}</tool_call>", "<think>\n\n</think>\n\n", [G]),
    (f"<tool_call>\n{LATE}\n</tool_call>", "", [("late", '{"x": 1}')]),
    (f"<tool_call>{TYPED}</tool_call>", "", [("typed", '{"y": 2}')]),
    (f"<tool_call>{ONE}<tool_call>{TWO}", "", [F, G]),
    (f"<tool_call>{ONE[:-1]}\n</tool_call>\n<tool_call>{TWO}</tool_call> Done.", " Done.", [F, G]),
    (f"<tool_call>{ONE[:-1]}<tool_call>{TWO}", "", [F, G]),
    (
        f'<tool_call>{{"name": "f"</tool_call>{TWO}',
        f'<tool_call>{{"name": "f"</tool_call>{TWO}',
        [],
    ),
    (f"<tool_call>{ONE[:-1]}, x}}</tool_call> Done.", " Done.", [F]),
    (HALF_NAME, HALF_NAME, []),
    (f'<tool_call>{{"arguments": {HALF}, "name": "late"}}</tool_call>', "", [("late", HALF)]),
    ('<tool_call>{"arguments" : {"x":1,  "y":1.0e2} ,"name": "f"}', "", [("f", SPACED)]),
    (f'<tool_call>{{"name": "f", "arguments": {HALF}}}</tool_call>', "", [("f", HALF)]),
    (f'<tool_call>{{"name": "f", "arguments": {WRONG}}}</tool_call> .', " .", [("f", WRONG)]),
    (f'<tool_call>{{"name": "f", "arguments": {WRONG}', "", [("f", WRONG)]),
    ("a <tool_cal> b <tool_", "a <tool_cal> b <tool_", []),
    ('<tool_call>{"a": 1}</tool_call>', '<tool_call>{"a": 1}</tool_call>', []),
    ('<tool_call>{"name": 1, "arguments": {}}', '<tool_call>{"name": 1, "arguments": {}}', []),
    ("<tool_call>text</tool_call>", "<tool_call>text</tool_call>", []),
    ("<tool_call>\n", "<tool_call>\n", []),
    ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("<tool_call>" + "{" * 50, "<tool_call>" + "{" * 50, []),
]
LLAMA: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call {", "no call {", []),
    (ONE, "", [F]),
    (f"<|python_tag|>{ONE}", "", [F]),
    (f"\n{ONE}; {TWO}", "", [F, G]),
    (f"{ONE};", "", [F]),
    (f"{ONE}; {TWO} ;\n", "", [F, G]),
    (f"{ONE} text", " text", [F]),
    (f"{ONE}; text;", "; text;", [F]),
    (f"{ONE};;", ";;", [F]),
    ('{"a": 1};', '{"a": 1};', []),
    (f"{ONE}{TWO}", TWO, [F]),
    (f'{{"name": "f", "parameters": {WRONG}}}; {TWO}', "", [("f", WRONG), G]),
    ('{"a": 1} is JSON', '{"a": 1} is JSON', []),
    ('{"a": 1}; ' + TWO, '{"a": 1}; ' + TWO, []),
    ("<|python_tag|>import os", "<|python_tag|>import os", []),
    ("<|python", "<|python", []),
    ('{"name": "f", ', '{"name": "f", ', []),
]
LISTS = [
    (f"[{TWO}]", "", [G]),
    (f"[{ONE.replace('arguments', 'parameters')}, {TWO}]", "", [F, G]),
    ("[<", "[<", []),
    ("[1, 2]", "[1, 2]", []),
    (", [see] this", ", [see] this", []),
    (f"[{TWO}, <b>]", ", <b>]", [G]),
    ('[{"a" <b>, {', '[{"a" <b>, {', []),
    ('[{"a": 1}, {"b": 2}] and more', '[{"a": 1}, {"b": 2}] and more', []),
]
CASES = [
    *((HermesReader, *each) for each in HERMES),
    *((LlamaReader, *each) for each in LLAMA),
    *((ListReader, *each) for each in LISTS),
]


def read(reader: TextReader, pieces: Iterable[str]) -> Parts:
    """All that a text adds, with the rule that the first part of a call has its name."""
    found, seen = Parts(), set()
    for each in [*map(reader.push, pieces), reader.finish()]:
        for call in each.calls:
            assert bool(call.name) == (call.index not in seen)
            seen.add(call.index)
        found.extend(each)
    assert reader.num_calls == len(found.calls)
    return found


def wanted(content: str, calls: list[tuple[str, str]]) -> Parts:
    return Parts(content, [CallPart(index, *each) for index, each in enumerate(calls)])


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize(("kind", "text", "content", "calls"), CASES)
def test_a_text_has_the_same_content_and_calls_however_it_is_divided(
    kind: Callable[..., TextReader],
    text: str,
    content: str,
    calls: list[tuple[str, str]],
    *,
    is_whole: bool,
) -> None:
    new = partial(kind, is_whole=is_whole)
    assert read(new(), [text]) == wanted(content, calls)
    assert read(new(), text) == wanted(content, calls)
    for place in range(len(text)):
        assert read(new(), [text[:place], text[place:]]) == wanted(content, calls)


@given(st.text('<>/tool_ca{}[]"\\:,; name', max_size=60), st.data())
def test_any_text_has_the_same_parts_however_it_is_divided(text: str, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(["", "<tool_call>", ONE[:20], ONE])) + text
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    pieces = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
    for kind in (HermesReader, LlamaReader):
        for is_whole in (True, False):
            whole = read(kind(is_whole=is_whole), [text])
            assert read(kind(is_whole=is_whole), pieces) == whole


def test_a_call_with_incomplete_arguments_is_content_of_a_whole_response() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": 1</tool_call><tool_call>{TWO}'
    content = text.removesuffix(f"<tool_call>{TWO}")
    assert read(HermesReader(is_whole=True), [text]) == wanted(content, [G])
    assert read(HermesReader(is_whole=False), [text]) == wanted("", [("f", '{"a": 1'), G])


def test_arguments_arrive_before_their_call_is_complete_only_in_a_stream() -> None:
    head = '<tool_call>{"name": "f", "arguments": {"a": '
    stream = HermesReader(is_whole=False)
    assert stream.push(head).calls == [CallPart(0, "f", '{"a": ')]
    assert stream.push("1").calls == [CallPart(0, "", "1")]
    assert stream.finish() == Parts()
    whole = HermesReader(is_whole=True)
    assert not whole.push(head + "1")
    assert whole.finish() == Parts(head + "1")
    assert whole.num_calls == 0


def test_calls_beyond_the_first_are_dropped_if_they_may_not_be_parallel() -> None:
    text = f"<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>"
    for is_whole in (True, False):
        assert read(HermesReader(is_whole=is_whole, max_calls=1), text) == wanted("", [F])


def test_a_named_function_has_all_text_as_its_arguments() -> None:
    reader = NamedReader("f")
    parts = [reader.push(each) for each in ('{"a":', "1}")]
    assert [each.calls for each in parts] == [[CallPart(0, "f", '{"a":')], [CallPart(0, "", "1}")]]
    assert reader.num_calls == 0


@pytest.mark.parametrize("opening", ['{"name": "', "{", '{"name"  '])
def test_the_beginning_of_an_object_is_matched_in_a_bounded_number_of_characters(
    monkeypatch: pytest.MonkeyPatch, opening: str
) -> None:
    lengths, pattern = [], tool_calls._HEAD

    class Recorded:
        def match(self, text: str) -> object:
            lengths.append(len(text))
            return pattern.match(text)

    monkeypatch.setattr(tool_calls, "_HEAD", Recorded())
    reader = LlamaReader(is_whole=False)
    filler = "ab" if opening.endswith('"') else "  "
    for part in (opening, *[filler] * 5000):
        assert not reader.push(part)
    assert max(lengths) <= 1024
    assert len(lengths) <= 1024


def test_a_call_with_a_long_name_is_reported_at_its_end() -> None:
    name = "f" * 5000
    head = f'<tool_call>{{"name": "{name}", "arguments": {{'
    for is_whole in (True, False):
        reader = HermesReader(is_whole=is_whole)
        assert not reader.push(head)
        assert reader.push("}}").calls == [CallPart(0, name, "{}")]

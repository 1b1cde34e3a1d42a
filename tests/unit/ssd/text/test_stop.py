import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.text.stop import StopStrings

LETTERS = "ab\n"


def run(stop: list[str], pieces: list[str]) -> tuple[str, bool]:
    matcher = StopStrings(stop)
    text = "".join(matcher.push(piece) for piece in pieces) + matcher.finish()
    return text, matcher.is_complete


def expected(stop: list[str], text: str) -> tuple[str, bool]:
    """Characters come one at a time; the first stop string to be whole ends the text."""
    for end in range(1, len(text) + 1):
        ending = [each for each in stop if text[:end].endswith(each)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


def test_without_stop_strings_text_is_returned_at_once() -> None:
    matcher = StopStrings([])
    assert matcher.push("def f") == "def f"
    assert matcher.finish() == ""


def test_a_stop_string_and_the_text_after_it_are_omitted() -> None:
    assert run(["\n\n"], ["a = 1\n\nb = 2"]) == ("a = 1", True)


def test_a_stop_string_can_span_pushes() -> None:
    assert run(["STOP"], ["x S", "T", "O", "P y"]) == ("x ", True)


def test_only_a_possible_start_is_held_back() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("one ST") == "one "
    assert matcher.push("ART") == "START"
    assert not matcher.is_complete


def test_a_partial_match_is_released_at_the_end() -> None:
    assert run(["STOP"], ["one ST"]) == ("one ST", False)


def test_the_match_that_is_complete_first_ends_the_text() -> None:
    assert run(["bcd", "b"], ["abcd"]) == ("a", True)
    assert run(["d", "bcd"], ["abcd"]) == ("a", True)


def test_no_text_is_returned_after_the_end() -> None:
    matcher = StopStrings(["b"])
    assert matcher.push("ab") == "a"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


@pytest.mark.parametrize("text", ["aab", "aaab", "aaaab"])
def test_a_match_that_starts_inside_a_failed_match_is_found(text: str) -> None:
    assert run(["aab"], list(text)) == (text[:-3], True)


@given(
    st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    st.lists(st.text(LETTERS, max_size=5), max_size=8),
)
def test_the_division_into_pieces_does_not_change_the_result(
    stop: list[str], pieces: list[str]
) -> None:
    assert run(stop, pieces) == expected(stop, "".join(pieces))


@given(
    st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(LETTERS, max_size=5), max_size=8),
)
def test_less_than_the_longest_stop_string_is_held_back(stop: list[str], pieces: list[str]) -> None:
    matcher = StopStrings(stop)
    pushed = released = 0
    for piece in pieces:
        pushed += len(piece)
        released += len(matcher.push(piece))
        if not matcher.is_complete:
            assert pushed - released < max(map(len, stop))

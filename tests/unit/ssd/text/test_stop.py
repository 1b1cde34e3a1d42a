from hypothesis import example, given
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


def test_only_a_possible_start_is_held_back() -> None:
    matcher = StopStrings(["STOP"])
    assert matcher.push("one ST") == "one "
    assert matcher.push("ART") == "START"
    assert not matcher.is_complete


@given(
    st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
    st.lists(st.text(LETTERS, max_size=5), max_size=8),
)
@example(["STOP"], ["x S", "T", "O", "P y", "z"])
@example(["bcd", "b"], ["abcd"])
@example(["d", "bcd"], ["abcd"])
@example(["aab"], list("aaaab"))
@example(["STOP"], ["one ST"])
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

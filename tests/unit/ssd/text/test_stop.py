from hypothesis import given
from hypothesis import strategies as st

from ssd.testing.tokenizer import ByteTokenizer
from ssd.text.stop import StopStrings, TextWriter

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


def test_no_text_is_returned_after_the_end() -> None:
    matcher = StopStrings(["b"])
    assert matcher.push("ab") == "a"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


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


def write(text: str, stop: tuple[str, ...], size: int) -> tuple[str, int]:
    """Return the text of the writer and the number of tokens up to the end of the sequence."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    detector = TextWriter(tokenizer, stop)
    count = next((n + 1 for n, token in enumerate(ids) if detector.completes(token)), len(ids))
    writer = TextWriter(tokenizer, stop)
    pieces = [writer.push(ids[first : min(first + size, count)]) for first in range(0, count, size)]
    return "".join(pieces) + writer.finish(), count


@given(
    text=st.text("abé€", max_size=30),
    stop=st.lists(st.text("abé€", min_size=1, max_size=4), max_size=3),
    size=st.integers(1, 9),
)
def test_text_ends_before_the_stop_string_for_every_grouping_of_tokens(
    text: str, stop: list[str], size: int
) -> None:
    seen, count = write(text, tuple(stop), size)
    ends = [text.index(each) + len(each) for each in stop if each in text]
    if not ends:
        assert (seen, count) == (text, len(text.encode()))
        return
    end = min(ends)
    start = min(text.index(each) for each in stop if each in text[:end])
    assert count == len(text[:end].encode())
    assert seen == text[:start]

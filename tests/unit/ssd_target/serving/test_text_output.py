"""Text writer and stop detector find the same end of a text."""

from hypothesis import given
from hypothesis import strategies as st

from ssd.testing.tokenizer import ByteTokenizer
from ssd.types import Round, TokenText
from ssd_target.serving.text_output import StopStringDetector, TextWriter, with_texts


def write(text: str, stop: tuple[str, ...], size: int) -> tuple[str, int]:
    """Return the text of the writer and the number of tokens up to the end of the sequence."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    detector = StopStringDetector(tokenizer, stop)
    count = next((n + 1 for n, token in enumerate(ids) if detector.completes(token)), len(ids))
    writer = TextWriter(tokenizer, stop)
    pieces = [writer.push(ids[first : min(first + size, count)]) for first in range(0, count, size)]
    return "".join(pieces) + writer.finish(), count


@given(
    text=st.text("abé€", max_size=30),
    stop=st.lists(st.text("abé€", min_size=1, max_size=4), min_size=1, max_size=3),
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


def test_without_stop_strings_the_text_is_complete() -> None:
    assert write("déjà vu", (), 3) == ("déjà vu", 9)


def test_tokens_of_rounds_receive_their_text() -> None:
    accepted, rejected, bonus = (TokenText(ord(letter)) for letter in "abc")
    reported = Round((accepted, rejected), 1, (accepted, bonus))
    (found,) = with_texts([reported], ByteTokenizer())
    assert [each.text for each in found.proposed] == ["a", "b"]
    assert [each.text for each in found.added] == ["a", "c"]
    assert found.accepted_tokens == 1

"""Text writer and stop detector find the same end of a text."""

from hypothesis import given
from hypothesis import strategies as st

from ssd.rpc import sampling_codec
from ssd.testing.tokenizer import ByteTokenizer
from ssd.types import GenerationChunk, PositionLogprobs, Round, TokenLogprob, TokenText
from ssd_target.serving.text_output import StopStringDetector, TextWriter, add_texts


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


def test_tokens_with_log_probabilities_receive_the_bytes_of_parts_of_characters() -> None:
    tokenizer = ByteTokenizer()
    positions = tuple(
        PositionLogprobs(TokenLogprob(each, -1.0), (TokenLogprob(each, -1.0),))
        for each in tokenizer.encode("aé日😀")
    )
    add_texts(GenerationChunk(token_ids=(), logprobs=positions), tokenizer)
    messages = sampling_codec.logprobs_messages(positions)
    written = list(map(sampling_codec.position_logprobs, messages))
    assert b"".join(each.selected.encoded for each in written) == "aé日😀".encode()
    assert b"".join(each.top[0].encoded for each in written) == "aé日😀".encode()
    assert [each.selected.partial for each in written[:2]] == [b"", b"\xc3"]


def test_tokens_of_rounds_receive_their_text() -> None:
    accepted, rejected, bonus = (TokenText(ord(letter)) for letter in "abc")
    found = Round((accepted, rejected), 1, (accepted, bonus))
    add_texts(GenerationChunk(token_ids=(), rounds=(found,)), ByteTokenizer())
    assert [each.text for each in found.proposed] == ["a", "b"]
    assert [each.text for each in found.added] == ["a", "c"]

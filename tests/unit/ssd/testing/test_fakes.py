import pytest

from ssd.ports import Clock, Tokenizer, TokenSink
from ssd.testing.clock import FakeClock
from ssd.testing.sink import ListSink
from ssd.testing.tokenizer import ByteTokenizer
from ssd.types import FinishReason, GenerationChunk


def test_the_fakes_fit_their_protocols() -> None:
    clock: Clock = FakeClock()
    tokenizer: Tokenizer = ByteTokenizer()
    assert clock.now() == 0.0
    assert tokenizer.vocab_size == 257


def test_a_sink_has_a_reader_that_may_leave() -> None:
    sink = ListSink()
    as_port: TokenSink = sink
    as_port.put(GenerationChunk(token_ids=(1,)))
    sink.is_abandoned = True
    assert as_port.is_abandoned
    assert sink.token_ids == (1,)


def test_a_sink_takes_nothing_after_the_end() -> None:
    sink = ListSink()
    sink.put(GenerationChunk(token_ids=(1,), finish_reason=FinishReason.STOP))
    with pytest.raises(AssertionError):
        sink.put(GenerationChunk(token_ids=(2,)))


def test_the_clock_stands_still_until_it_is_moved() -> None:
    clock = FakeClock(5.0)
    assert clock.now() == clock.now() == 5.0
    clock.advance(0.25)
    assert clock.now() == 5.25


def test_bytes_go_to_ids_and_back_and_broken_characters_are_marked() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("a\N{SNOWMAN}")
    assert tokenizer.decode(ids) == "a\N{SNOWMAN}"
    assert tokenizer.decode(ids[:-1]) == "a\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode([*ids, 256]) == "a\N{SNOWMAN}"

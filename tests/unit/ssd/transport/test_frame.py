import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ssd.errors import FrameError
from ssd.transport.frame import (
    HEADER_WORDS,
    MAGIC,
    VERSION,
    Frame,
    FrameKind,
    FrameLimits,
    decode,
    encode,
)

WORD = st.integers(0, 2**31 - 1)
CELL = st.integers(-(2**31), 2**31 - 1)


def some_frame(rows: int = 2, width: int = 3) -> Frame:
    rows_RW = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    return Frame(FrameKind.TABLES, 7, 9, rows_RW)


def payload_with(**changes: int) -> bytes:
    names = ("magic", "version", "kind", "epoch", "number", "rows", "width", "reserved")
    header = dict(zip(names, (MAGIC, VERSION, 2, 7, 9, 2, 3, 0), strict=True)) | changes
    return np.array([*header.values(), *range(6)], dtype="<i4").tobytes()


@given(st.sampled_from(FrameKind), WORD, WORD, st.data())
def test_a_decoded_frame_equals_the_encoded_one(
    kind: FrameKind, epoch: int, number: int, data: st.DataObject
) -> None:
    rows, width = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 5))
    cells = data.draw(st.lists(CELL, min_size=rows * width, max_size=rows * width))
    rows_RW = np.array(cells, dtype=np.int32).reshape(rows, width)
    found = decode(encode(Frame(kind, epoch, number, rows_RW)))
    assert (found.kind, found.epoch, found.sequence_number) == (kind, epoch, number)
    assert found.rows_RW.dtype == np.int32
    assert np.array_equal(found.rows_RW, rows_RW)


@given(st.binary(max_size=200))
def test_bytes_without_the_magic_are_rejected(payload: bytes) -> None:
    assume(payload[:4] != MAGIC.to_bytes(4, "little"))
    with pytest.raises(FrameError):
        decode(payload)


@given(st.integers(0, 60), st.binary(max_size=8))
def test_a_frame_with_a_truncated_or_changed_end_is_rejected(length: int, end: bytes) -> None:
    whole = payload_with()
    changed = whole[:length] + end
    assume(len(changed) != len(whole))
    with pytest.raises(FrameError):
        decode(changed)


@given(st.integers(0, 13), CELL)
def test_a_frame_with_one_wrong_word_raises_only_a_frame_error(index: int, word: int) -> None:
    words = np.frombuffer(payload_with(), dtype="<i4").copy()
    words[index] = word
    try:
        frame = decode(words.tobytes(), FrameLimits(max_rows=4, max_width=4))
    except FrameError:
        return
    assert frame.rows_RW.size == 6
    assert index >= 2 or word == (MAGIC, VERSION)[index]


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "0 bytes"),
        (b"x" * 31, "31 bytes"),
        (payload_with() + b"x", "whole words"),
        (payload_with(magic=1), "begins with"),
        (payload_with(version=2), "version 2"),
        (payload_with(kind=3), "kind 3"),
        (payload_with(epoch=-1), "epoch -1"),
        (payload_with(number=-1), "number -1"),
        (payload_with(reserved=1), "reserved 1"),
        (payload_with(rows=3), "expected 68"),
        (payload_with(rows=-1), "-1 rows"),
        (payload_with(width=0), "rows of 0"),
        (payload_with(rows=2**31 - 1, width=2**31 - 1), "allowed are"),
        (payload_with()[:-4], "expected 56"),
    ],
)
def test_a_malformed_frame_is_rejected_with_the_reason(payload: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        decode(payload)


def test_limits_apply_to_sent_and_received_frames() -> None:
    with pytest.raises(FrameError, match="5 rows of 3, allowed are 4 of 3"):
        encode(some_frame(5, 3), FrameLimits(max_rows=4, max_width=3))
    with pytest.raises(FrameError, match="2 rows of 3, allowed are 4 of 2"):
        decode(encode(some_frame()), FrameLimits(max_rows=4, max_width=2))


@pytest.mark.parametrize(
    "frame",
    [
        Frame(FrameKind.COMMITS, 1, 1, np.zeros(3, dtype=np.int32)),
        Frame(FrameKind.COMMITS, 1, 1, np.zeros((1, 3), dtype=np.int64)),
        Frame(FrameKind.COMMITS, -1, 1, np.zeros((1, 3), dtype=np.int32)),
        Frame(FrameKind.COMMITS, 2**31, 1, np.zeros((1, 3), dtype=np.int32)),
    ],
)
def test_rows_or_header_words_of_another_type_are_not_sent(frame: Frame) -> None:
    with pytest.raises(FrameError):
        encode(frame)


def test_rows_that_are_not_contiguous_are_sent_in_their_order() -> None:
    wide_RW = np.arange(12, dtype=np.int32).reshape(3, 4)
    rows_RW = wide_RW[::2, ::-1]
    assert np.array_equal(decode(encode(Frame(FrameKind.TABLES, 1, 1, rows_RW))).rows_RW, rows_RW)


def test_the_largest_default_frame_fits_a_grpc_message() -> None:
    limits = FrameLimits()
    num_words = HEADER_WORDS + limits.max_rows * limits.max_width
    assert 4 * num_words + 64 < 16 * 1024 * 1024


def test_the_header_is_little_endian_and_32_bytes() -> None:
    payload = encode(some_frame(0, 3))
    assert len(payload) == 4 * HEADER_WORDS == 32
    assert payload[:4] == b"FDSS"

"""The one frame format of all tensor channels, and the Protocol they implement.

A frame is little-endian int32: a header of eight words (magic, version, kind, epoch, sequence
number, rows, width, flags), then ``rows`` rows of ``width`` words. Letters: **R** packed rows,
**W** columns of a frame.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ssd.errors import FrameError

MAGIC = 0x53534446
"""``SSDF`` read as a number."""
VERSION = 1
HEADER_WORDS = 8
WORD_BYTES = 4
_LARGEST_WORD = 2**31 - 1
_WORD = np.dtype("<i4")


class FrameKind(IntEnum):
    """What the rows are."""

    COMMITS = 1
    """Target to draft."""
    TABLES = 2
    """Draft to target."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Rows of one kind.

    ``epoch`` and ``sequence_number`` are 0..2^31-1; channels carry them and do not look at them.
    ``rows_RW`` is int32 and, on arrival, read-only.
    """

    kind: FrameKind
    epoch: int
    sequence_number: int
    rows_RW: npt.NDArray[np.int32]
    flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """What a peer may make us hold with one frame; the product stays below 16 MiB."""

    max_rows: int = 65_536
    """256 sessions with a table of 128 branches and a head row each need half of it."""
    max_width: int = 32
    """A row with 16 tokens needs 22."""

    @property
    def max_bytes(self) -> int:
        """Bytes of the largest frame."""
        return WORD_BYTES * (HEADER_WORDS + self.max_rows * self.max_width)


DEFAULT_LIMITS = FrameLimits()


class TensorChannel(Protocol):
    """One end of a two-way path for frames.

    Frames arrive in the order in which they were sent, or the channel is lost. A channel does not
    repeat frames, but a peer may: who reads them matches epoch, session and base length exactly.
    """

    @property
    def transport(self) -> str:
        """How the bytes travel: ``tcp``, ``rdma``, ``nvlink``.

        A channel that may take several ways tells the one that it was found to take.
        """
        ...

    def start(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Deliver frames to ``on_frame``, from one thread; call ``on_lost`` at most once.

        Called once. Frames that came earlier are delivered now. After ``on_lost`` nothing follows.
        A malformed or oversize frame closes the channel, and ``on_lost`` gets a ``FrameError``.
        """
        ...

    def send(self, frame: Frame) -> None:
        """Queue a frame; from any thread, never blocks.

        Raises:
            FrameError: the frame is over the limits; nothing was sent.
            LinkError: the channel is closed or lost, or its bounded outbox is full.
        """
        ...

    def close(self) -> None:
        """End the channel at both ends. Idempotent; one's own close calls no ``on_lost``."""
        ...


def encode(frame: Frame, limits: FrameLimits = DEFAULT_LIMITS) -> bytes:
    """Bytes of a frame.

    Raises:
        FrameError: rows that are not int32 [R, W], or more than the limits allow.
    """
    rows_RW = frame.rows_RW
    if rows_RW.ndim != 2 or rows_RW.dtype != np.int32:
        raise FrameError(
            f"rows are {rows_RW.dtype} of {rows_RW.ndim} dimensions, a frame holds int32 [R, W]"
        )
    num_rows, width = rows_RW.shape
    _check_shape(num_rows, width, limits)
    header = (
        MAGIC,
        VERSION,
        int(frame.kind),
        frame.epoch,
        frame.sequence_number,
        num_rows,
        width,
        frame.flags,
    )
    if min(header) < 0 or max(header) > _LARGEST_WORD:
        raise FrameError(f"a header word is outside 0..{_LARGEST_WORD}: {header}")
    return np.array(header, dtype=_WORD).tobytes() + rows_RW.astype(_WORD, copy=False).tobytes()


def decode(
    payload: bytes,
    max_rows: int = DEFAULT_LIMITS.max_rows,
    max_width: int = DEFAULT_LIMITS.max_width,
) -> Frame:
    """The frame of these bytes; its rows are a read-only view of them.

    Raises:
        FrameError: another magic or version, an unknown kind, a negative header word, a shape over
            the limits, or a length that is not the one that the header promises.
    """
    num_bytes = len(payload)
    if num_bytes < HEADER_WORDS * WORD_BYTES or num_bytes % WORD_BYTES:
        raise FrameError(
            f"a frame has {num_bytes} bytes; it needs a header of {HEADER_WORDS * WORD_BYTES} "
            f"and whole words of {WORD_BYTES}"
        )
    words = np.frombuffer(payload, dtype=_WORD)
    magic, version, kind, epoch, number, num_rows, width, flags = words[:HEADER_WORDS].tolist()
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {magic:#x}, expected {MAGIC:#x}")
    if version != VERSION:
        raise FrameError(f"a frame has version {version}, this end speaks {VERSION}")
    if kind not in {FrameKind.COMMITS, FrameKind.TABLES}:
        raise FrameError(f"a frame has the unknown kind {kind}")
    if min(epoch, number, flags) < 0:
        raise FrameError(f"a header word is negative: epoch {epoch}, number {number}, {flags=}")
    _check_shape(num_rows, width, FrameLimits(max_rows=max_rows, max_width=max_width))
    expected_bytes = WORD_BYTES * (HEADER_WORDS + num_rows * width)
    if num_bytes != expected_bytes:
        raise FrameError(
            f"a frame of {num_rows} rows of {width} has {num_bytes} bytes, expected "
            f"{expected_bytes}"
        )
    rows_RW = words[HEADER_WORDS:].reshape(num_rows, width).astype(np.int32, copy=False)
    return Frame(FrameKind(kind), epoch, number, rows_RW, flags)


def _check_shape(num_rows: int, width: int, limits: FrameLimits) -> None:
    if not 0 <= num_rows <= limits.max_rows or not 1 <= width <= limits.max_width:
        raise FrameError(
            f"a frame has {num_rows} rows of {width}, allowed are {limits.max_rows} of "
            f"{limits.max_width}"
        )

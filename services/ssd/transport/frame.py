"""The frame format of all tensor channels, and the Protocol that the channels implement.

A frame is little-endian int32: a header of eight words (magic, version, kind, epoch, sequence
number, rows, width, reserved), then ``rows`` rows of ``width`` words. Letters: **R** packed rows,
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
"""The letters ``SSDF`` as a number."""
VERSION = 1
HEADER_WORDS = 8
WORD_BYTES = 4
_RESERVED = 0
_LARGEST_WORD = 2**31 - 1
_WORD = np.dtype("<i4")


class FrameKind(IntEnum):
    """The meaning of the rows."""

    COMMITS = 1
    """Target to draft."""
    TABLES = 2
    """Draft to target."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """Rows of one kind.

    ``epoch`` and ``sequence_number`` are 0..2^31-1. Channels carry them unchanged and unchecked.
    Each end of a link numbers its frames from 1. Its peer drops a frame whose number is not higher
    than that of the newest one.
    ``rows_RW`` is int32. The rows of a received frame are a read-only view of its bytes.
    """

    kind: FrameKind
    epoch: int
    sequence_number: int
    rows_RW: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLimits:
    """The largest frame that a peer may send. The defaults stay below 16 MiB."""

    max_rows: int = 65_536
    """Twice the rows of 256 sessions that each have a table of 128 branches and a head row."""
    max_width: int = 32
    """A row with 16 tokens has 23 columns."""

    def check(self, num_rows: int, width: int) -> None:
        """Reject a frame that is too large.

        Raises:
            FrameError: too many rows or columns, or fewer than 0 rows or 1 column.
        """
        if not 0 <= num_rows <= self.max_rows or not 1 <= width <= self.max_width:
            raise FrameError(
                f"a frame has {num_rows} rows of {width}, allowed are {self.max_rows} of "
                f"{self.max_width}"
            )


DEFAULT_LIMITS = FrameLimits()


@dataclass(frozen=True, slots=True)
class ChannelQuality:
    """The measurement of a communicator."""

    round_trip_seconds: float
    """Of 4 KiB, median."""
    bytes_per_second: float
    """Of one large message and its 4 KiB echo, so at least this much."""


class TensorChannel(Protocol):
    """One end of a two-way connection for frames.

    Frames arrive in the order in which they were sent, or the channel is lost. A channel does not
    repeat frames. A peer can, so readers compare epoch, session and base length.
    """

    @property
    def transport(self) -> str:
        """How the bytes are transported: ``tcp``, or the path that NCCL reports.

        A channel with several possible transports returns the one that it uses.
        """
        ...

    def start(
        self, on_frame: Callable[[Frame], None], on_lost: Callable[[Exception], None]
    ) -> None:
        """Deliver frames to ``on_frame``, from one thread. Call ``on_lost`` at most once.

        Called once. Nothing follows ``on_lost``. A malformed or oversize frame, or one that
        arrived before ``start``, closes the channel; ``on_lost`` receives a ``FrameError``.
        """
        ...

    def send(self, frame: Frame) -> None:
        """Queue a frame. Any thread; never blocks.

        Raises:
            FrameError: the frame exceeds the limits; nothing was sent.
            LinkError: the channel is closed or lost, or its bounded outbox is full.
        """
        ...

    def close(self) -> None:
        """Close the channel at both ends. Idempotent; does not call ``on_lost`` at this end."""
        ...

    async def wait_closed(self) -> None:
        """Wait until everything that the channel held is released. After ``close`` or a loss."""
        ...


def encode(frame: Frame, limits: FrameLimits = DEFAULT_LIMITS) -> bytes:
    """Return the bytes of a frame.

    Raises:
        FrameError: rows that are not int32 [R, W], or more than the limits allow.
    """
    rows_RW = frame.rows_RW
    if rows_RW.ndim != 2 or rows_RW.dtype != np.int32:
        raise FrameError(
            f"rows are {rows_RW.dtype} of {rows_RW.ndim} dimensions, a frame holds int32 [R, W]"
        )
    num_rows, width = rows_RW.shape
    limits.check(num_rows, width)
    identity = (int(frame.kind), frame.epoch, frame.sequence_number)
    header = (MAGIC, VERSION, *identity, num_rows, width, _RESERVED)
    if min(header) < 0 or max(header) > _LARGEST_WORD:
        raise FrameError(f"a header word is outside 0..{_LARGEST_WORD}: {header}")
    return np.array(header, dtype=_WORD).tobytes() + rows_RW.astype(_WORD, copy=False).tobytes()


def decode(payload: bytes, limits: FrameLimits = DEFAULT_LIMITS) -> Frame:
    """Return the frame of these bytes. Its rows are a read-only view of them.

    Raises:
        FrameError: another magic or version, an unknown kind, a header word out of range, a shape
            over the limits, or a length that differs from the one in the header.
    """
    num_bytes = len(payload)
    if num_bytes < HEADER_WORDS * WORD_BYTES or num_bytes % WORD_BYTES:
        raise FrameError(
            f"a frame has {num_bytes} bytes; it needs a header of {HEADER_WORDS * WORD_BYTES} "
            f"and whole words of {WORD_BYTES}"
        )
    words = np.frombuffer(payload, dtype=_WORD)
    magic, version, kind, epoch, number, num_rows, width, reserved = words[:HEADER_WORDS].tolist()
    if magic != MAGIC:
        raise FrameError(f"a frame begins with {magic:#x}, expected {MAGIC:#x}")
    if version != VERSION:
        raise FrameError(f"a frame has version {version}, expected {VERSION}")
    if kind not in {FrameKind.COMMITS, FrameKind.TABLES}:
        raise FrameError(f"a frame has the unknown kind {kind}")
    if min(epoch, number) < 0 or reserved != _RESERVED:
        raise FrameError(
            f"a header word is out of range: epoch {epoch}, number {number}, reserved {reserved}"
        )
    limits.check(num_rows, width)
    expected_bytes = WORD_BYTES * (HEADER_WORDS + num_rows * width)
    if num_bytes != expected_bytes:
        raise FrameError(
            f"a frame of {num_rows} rows of {width} has {num_bytes} bytes, expected "
            f"{expected_bytes}"
        )
    rows_RW = words[HEADER_WORDS:].reshape(num_rows, width).astype(np.int32, copy=False)
    return Frame(FrameKind(kind), epoch, number, rows_RW)

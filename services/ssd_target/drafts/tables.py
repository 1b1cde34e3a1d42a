"""Receiving outcome tables, and waiting for them until the table deadline."""

import threading
from collections.abc import Sequence as Rows

from ssd.errors import FrameError
from ssd.ports import Clock
from ssd.speculation.table import OutcomeTable, unpack_tables
from ssd.telemetry import STALE_FRAMES_TOTAL
from ssd.transport.frame import Frame, FrameKind
from ssd.types import SequenceId
from ssd_target.drafts.link import DraftLink, Session
from ssd_target.drafts.session_registry import SessionRegistry
from ssd_target.settings import TargetSettings

Answer = tuple[Session, OutcomeTable | None]
"""An open session, and its table if the table arrived before the deadline."""


class TableCollector:
    """Receives the tables of all links, and collects those of a round.

    The asyncio loop calls ``receive``, the step thread ``collect``. ``changed`` is the lock of
    ``DraftPool``; it is notified when tables arrive or sessions end.
    """

    def __init__(
        self,
        settings: TargetSettings,
        num_token_ids: int,
        sessions: SessionRegistry,
        changed: threading.Condition,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._num_token_ids = num_token_ids
        self._sessions = sessions
        self._changed = changed
        self._clock = clock

    def receive(self, link: DraftLink, frame: Frame) -> None:
        """Keep the tables of a frame that match a session and its round exactly.

        A frame of another epoch, or without a higher number than the newest one, is stale.
        A draft sends at most one table for each opening and commit, and a frame has at most one
        table of each session. This bounds the time of the asyncio loop.

        Raises:
            FrameError: the frame is malformed or contains what was not requested.
        """
        if frame.epoch != link.epoch or frame.sequence_number <= link.newest_frame:
            STALE_FRAMES_TOTAL.inc()
            return
        link.newest_frame = frame.sequence_number
        tables = self._unpack(frame, link.peak_sessions)
        with self._changed:
            link.receive(tables, self._clock.now())
            self._changed.notify_all()

    def _unpack(self, frame: Frame, max_tables: int) -> list[OutcomeTable]:
        if frame.kind is not FrameKind.TABLES:
            raise FrameError(f"a draft sent a frame of kind {frame.kind.name}")
        settings = self._settings
        num_rows, max_rows = len(frame.rows_RW), max_tables * (settings.branches + 1)
        if num_rows > max_rows:
            raise FrameError(
                f"a frame has {num_rows} rows, the tables of {max_tables} sessions have "
                f"at most {max_rows}"
            )
        tables = unpack_tables(frame.rows_RW, settings.lookahead, self._num_token_ids)
        widest = max((len(table.bonus_N) for table in tables), default=0)
        if widest > settings.branches:
            raise FrameError(f"a table has {widest} branches, agreed are {settings.branches}")
        return tables

    def collect(self, sequence_ids: Rows[SequenceId]) -> dict[SequenceId, Answer]:
        """Wait for the tables of these sequences; return those of the sequences with open sessions.

        The lock is held by the caller and released while waiting.
        """
        if missing := self._missing(sequence_ids):
            now = self._clock.now()
            until = now + self._settings.draft_deadline_seconds
            if self._settings.adaptive_deadline:
                adaptive = [
                    each.requested_at + each.link.table_deadline.seconds for each in missing
                ]
                until = min(until, max(adaptive))
            self._changed.wait_for(lambda: not self._missing(sequence_ids), max(0.0, until - now))
        found = (self._sessions.find(sequence_id) for sequence_id in sequence_ids)
        return {each.sequence_id: (each, each.table) for each in found if each and each.is_open}

    def _missing(self, sequence_ids: Rows[SequenceId]) -> list[Session]:
        """Return the open sessions without a table."""
        sessions = (self._sessions.find(sequence_id) for sequence_id in sequence_ids)
        return [each for each in sessions if each and each.is_open and each.table is None]

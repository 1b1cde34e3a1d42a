"""One link to a target after its handshake: commits in, tables and refusals out."""

import asyncio
import itertools
from collections.abc import Callable, Collection

from ssd.errors import FrameError, LinkError
from ssd.rpc.link import LinkFrames, LinkServerCall, as_link_error
from ssd.speculation.table import OutcomeTable, pack_tables, row_width, unpack_commits
from ssd.telemetry import BAD_FRAMES_TOTAL, STALE_FRAMES_TOTAL, get_logger
from ssd.threads import post
from ssd.transport.channels import CHANNELS
from ssd.transport.frame import Frame, FrameKind, FrameLimits
from ssd.types import Branch, Commit, Draining, Hello, LinkSettings, RefusalReason, SessionRefused
from ssd_draft.setup import DraftSetup

_log = get_logger(__name__)


class TargetLink:
    """The draft's end of one link. ``push``, ``refuse`` and ``fail`` from any thread.

    ``ended`` holds the reason of the end; None if the target closed the link.
    """

    def __init__(self, number: int, hello: Hello, call: LinkServerCall, setup: DraftSetup) -> None:
        self.number = number
        self.epoch = hello.epoch
        self.name = hello.peer.pod or f"link {number}"
        self.settings = LinkSettings(fan_out_policy=setup.settings.fan_out)
        self._call = call
        self._vocab_size = setup.vocab_size
        self._lookahead = setup.settings.lookahead
        self._max_sessions = setup.settings.max_sessions
        self._channel = CHANNELS[hello.channel](LinkFrames(call), frame_limits(setup))
        self._loop = asyncio.get_running_loop()
        self._frame_numbers = itertools.count(1)
        self._newest_frame = 0
        self.ended: asyncio.Future[LinkError | None] = self._loop.create_future()

    def start(self, on_commits: Callable[[list[Commit]], None]) -> None:
        """Deliver valid commits on the loop's thread."""
        self._channel.start(
            lambda frame: self._on_frame(frame, on_commits),
            lambda error: self.end(as_link_error(error)),
        )

    def push(self, tables: Collection[OutcomeTable]) -> None:
        """Send the columns that tables have in one frame."""
        rows_RW = pack_tables(list(tables), row_width(self._lookahead))
        try:
            self._channel.send(
                Frame(FrameKind.TABLES, self.epoch, next(self._frame_numbers), rows_RW)
            )
        except LinkError as error:
            self.fail(error)

    def refuse(self, session: int, reason: RefusalReason) -> None:
        """Send that a session is closed or not opened."""
        try:
            self._call.send(SessionRefused(session, str(reason)))
        except LinkError as error:
            self.fail(error)

    def fail(self, error: LinkError) -> None:
        """End the link because of an error."""
        post(self._loop, self.end, error)

    def end(self, error: LinkError) -> None:
        """End the link; the first reason counts. Loop's thread only."""
        if not self.ended.done():
            self.ended.set_result(error)

    def send_draining(self) -> None:
        """Send that this draft accepts no more sessions."""
        try:
            self._call.send(Draining())
        except LinkError as error:
            self.end(error)

    def close(self) -> None:
        """Close the channel; idempotent."""
        self._channel.close()

    def _on_frame(self, frame: Frame, on_commits: Callable[[list[Commit]], None]) -> None:
        if self.ended.done():
            return
        if frame.epoch != self.epoch or frame.sequence_number <= self._newest_frame:
            STALE_FRAMES_TOTAL.inc()
            return
        self._newest_frame = frame.sequence_number
        try:
            commits = self._commits_of(frame)
        except FrameError as error:
            BAD_FRAMES_TOTAL.inc()
            _log.warning("bad_frame", target=self.name, reason=str(error))
            self.end(error)
            return
        on_commits(commits)

    def _commits_of(self, frame: Frame) -> list[Commit]:
        """Return the commits of a frame.

        Raises:
            FrameError: the frame is not a valid frame of commits.
        """
        if frame.kind is not FrameKind.COMMITS:
            raise FrameError(f"a target sent a frame of kind {frame.kind.name}")
        if len(frame.rows_RW) > self._max_sessions:
            raise FrameError(
                f"a frame has {len(frame.rows_RW)} commits, this draft has at most "
                f"{self._max_sessions} sessions"
            )
        commits = unpack_commits(frame.rows_RW, self._lookahead)
        for commit in commits:
            check_commit(commit, self._vocab_size)
        return commits


def frame_limits(setup: DraftSetup) -> FrameLimits:
    """Return the largest frame of a link: one table of each session."""
    settings = setup.settings
    return FrameLimits(
        max_rows=settings.max_sessions * (settings.branches + 1),
        max_width=row_width(settings.lookahead),
    )


def check_commit(commit: Commit, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        FrameError: the commit contains one.
    """
    proposed = () if isinstance(commit.next, Branch) else commit.next.tokens
    highest = max((commit.outcome.bonus, *proposed))
    if highest >= vocab_size:
        raise FrameError(f"a commit has token id {highest}, the vocabulary has {vocab_size} ids")

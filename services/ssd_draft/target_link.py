"""One link to a target after its handshake: commits in, tables and refusals out."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Collection

from ssd.channel_setup import COLLECTIVE
from ssd.errors import FrameError, LinkError
from ssd.link_channel import LinkChannel
from ssd.rpc.link import LinkServerCall, as_link_error
from ssd.speculation.table import OutcomeTable, pack_tables, row_width, unpack_commits
from ssd.telemetry import BAD_FRAMES_TOTAL, STALE_FRAMES_TOTAL, get_logger
from ssd.threads import post
from ssd.transport.frame import Frame, FrameKind
from ssd.types import Branch, Commit, Draining, Hello, LinkSettings, RefusalReason, SessionRefused
from ssd_draft.setup import DraftSetup

_log = get_logger(__name__)
MAX_EARLY = 64
"""Maximum number of frames that wait for the opening of a session, which was sent before them."""


class TargetLink:
    """The draft's end of one link. ``push``, ``refuse`` and ``fail`` from any thread.

    ``ended`` holds the reason of the end; None if the target closed the link.
    """

    def __init__(
        self,
        number: int,
        hello: Hello,
        call: LinkServerCall,
        setup: DraftSetup,
        channel: LinkChannel,
    ) -> None:
        self.number = number
        self.epoch = hello.epoch
        self.name = hello.peer.pod or f"link {number}"
        self.settings = LinkSettings(fan_out_policy=setup.settings.fan_out)
        self._call = call
        self._vocab_size = setup.vocab_size
        self._lookahead = setup.settings.lookahead
        self._max_sessions = setup.settings.max_sessions
        self._channel = channel.channel
        self._is_ordered = channel.name != COLLECTIVE
        """Whether frames arrive in order with control messages."""
        self._newest_session = 0
        """Number of the newest session that the target has opened."""
        self._early: deque[list[Commit]] = deque()
        """Commits that overtook the opening of one of their sessions, and those after them."""
        self._loop = asyncio.get_running_loop()
        self._frame_numbers = itertools.count(1)
        self._newest_frame = 0
        self.ended: asyncio.Future[LinkError | None] = self._loop.create_future()

    def start(self, on_commits: Callable[[list[Commit]], None]) -> None:
        """Deliver valid commits on the loop's thread."""
        self._on_commits = on_commits
        self._channel.start(self._on_frame, lambda error: self.end(as_link_error(error)))

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

    def note_opening(self, session: int) -> None:
        """Deliver the commits that have waited for the opening of a session. Loop's thread."""
        self._newest_session = session
        while self._early and not self._is_early(self._early[0]):
            self._on_commits(self._early.popleft())

    async def close(self) -> None:
        """Close the channel and wait until it holds nothing more; idempotent."""
        self._channel.close()
        await self._channel.wait_closed()

    def _on_frame(self, frame: Frame) -> None:
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
        if not self._early and not self._is_early(commits):
            self._on_commits(commits)
        elif len(self._early) < MAX_EARLY:
            self._early.append(commits)
        else:
            self.end(FrameError(f"{MAX_EARLY} frames have commits of sessions that are not open"))

    def _is_early(self, commits: Collection[Commit]) -> bool:
        """Whether commits have overtaken the opening of their session on another connection."""
        newest = max((commit.session for commit in commits), default=0)
        return not self._is_ordered and newest > self._newest_session

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


def check_commit(commit: Commit, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary.

    Raises:
        FrameError: the commit contains one.
    """
    proposed = () if isinstance(commit.next, Branch) else commit.next.tokens
    highest = max((commit.outcome.bonus, *proposed))
    if highest >= vocab_size:
        raise FrameError(f"a commit has token id {highest}, the vocabulary has {vocab_size} ids")

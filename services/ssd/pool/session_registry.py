"""The sessions of a target on its drafts."""

from collections.abc import Collection, Iterable

from ssd.pool.link import DraftLink, Session
from ssd.pool.table_deadline import opening_seconds
from ssd.types import SequenceId


class SessionRegistry:
    """All sessions by sequence, and the links that cannot serve a sequence.

    Guarded by the lock of ``DraftPool``. Only this class adds and removes sessions.
    """

    def __init__(self) -> None:
        self._sessions: dict[SequenceId, Session] = {}
        self._excluded: dict[SequenceId, set[DraftLink]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._sessions

    def find(self, sequence_id: SequenceId) -> Session | None:
        """Return the session of a sequence."""
        return self._sessions.get(sequence_id)

    def add(
        self,
        link: DraftLink,
        sequence_id: SequenceId,
        base_len: int,
        now: float,
        max_len: int,
    ) -> Session:
        """Add a session that is about to open; ``max_len`` is that of its sequence, in tokens."""
        # A draft prefills prompts one after the other, so earlier openings come first.
        earlier = sum(each.base_len for each in link.sessions.values() if not each.is_open)
        session = Session(
            number=link.next_session_number(),
            sequence_id=sequence_id,
            link=link,
            base_len=base_len,
            requested_at=now,
            open_by=now + opening_seconds(earlier + base_len),
            max_len=max_len,
        )
        self._sessions[sequence_id] = session
        link.sessions[session.number] = session
        link.peak_sessions = max(link.peak_sessions, len(link.sessions))
        link.request_table()
        return session

    def remove(self, sessions: Iterable[Session]) -> None:
        """Remove sessions; those that are not registered have no effect."""
        for session in sessions:
            if self._sessions.get(session.sequence_id) is session:
                del self._sessions[session.sequence_id]
            session.link.sessions.pop(session.number, None)

    def exclude(self, sequence_id: SequenceId, link: DraftLink) -> None:
        """Note that a link cannot serve a sequence."""
        self._excluded.setdefault(sequence_id, set()).add(link)

    def excluded_links(self, sequence_id: SequenceId) -> Collection[DraftLink]:
        """Return the links that cannot serve a sequence."""
        return self._excluded.get(sequence_id, ())

    def end_sequence(self, sequence_id: SequenceId) -> Session | None:
        """Remove everything about a sequence that has ended; return its session."""
        self._excluded.pop(sequence_id, None)
        session = self._sessions.get(sequence_id)
        if session is not None:
            self.remove([session])
        return session

"""What the step thread does for one link: the batches of tables that it builds. No I/O."""

from collections import deque
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

from ssd.speculation.estimates import Acceptance
from ssd_draft.commit_forecast import CommitForecast
from ssd_draft.sessions import USUAL_ACCEPTANCE, Session
from ssd_draft.table_build import TableBuild

_BATCHES_BETWEEN_CHUNKS = 4
"""After this number of batches of tables of a link, its opening session gets one prefill chunk. The
number is smaller where fewer sessions are open for each opening one: a batch of tables for a few
sessions takes as long as the chunk that the others wait for."""


@dataclass(slots=True)
class Batch:
    """A batch of tables that is built, and its sessions in the order of its rows."""

    sessions: list[Session]
    arrivals: list[float]
    """When each table began to be expected: its commit arrived, or its session opened."""
    build: TableBuild
    begun_at: float
    stepped_at: float = 0.0
    """When the newest step ended."""
    seconds_of_steps: float = 0.0
    """Duration of its steps."""
    sent_depth: int = 0
    is_timed: bool = True
    """Whether its work is measured; before the first table of a session, it includes the prefill.
    """


@dataclass(slots=True)
class LinkWork:
    """What the worker does for one link."""

    batches: deque[Batch] = field(default_factory=deque)
    """Batches that are built. They take turns; a new one comes last."""
    batches_since_chunk: int = 0
    step_seconds: float = 0.0
    """Mean duration of a step of a tree; 0 before the first step."""
    work_seconds: float = 0.0
    """Duration of the turns since the end of the newest batch, without the steps of batches."""
    resumed_at: float = 0.0
    """Until when the current turn is measured, or when this turn began."""
    forecast: CommitForecast = field(default_factory=CommitForecast)
    acceptance: Acceptance = field(default_factory=lambda: Acceptance(USUAL_ACCEPTANCE))
    """Acceptance of the tokens of tables in all texts; the acceptance of a new text starts here."""

    def add_work(self, now: float) -> None:
        """Add the time since ``resumed_at``."""
        self.work_seconds += now - self.resumed_at
        self.resumed_at = now

    def add_steps(self, batch: Batch, now: float) -> None:
        """Add the time since ``resumed_at`` to the steps of a batch."""
        batch.seconds_of_steps += now - self.resumed_at
        self.resumed_at = now

    def end_batch(self, batch: Batch) -> None:
        """Measure the work for a batch that runs no more steps.

        It has its own steps, since others of the link may run beside it, and the rest of the turns
        since the end of the batch before. A batch that ends early counts with all its steps. What
        was done for a batch that ends without a step counts for the next one.
        """
        num_steps = batch.build.num_steps
        if not num_steps:
            return
        if batch.is_timed:
            steps = batch.seconds_of_steps * (batch.build.length + 1) / num_steps
            seconds = self.work_seconds + steps
            batch.sessions[0].link.batch_times.add_batch([seconds] * len(batch.sessions))
        self.work_seconds = 0.0


def opening_due(work: LinkWork, sessions: Rows[Session], *, is_busy: bool) -> Session | None:
    """Return the opening session whose prefill chunk is due, if there is one."""
    opening = [session for session in sessions if not session.is_open]
    if not opening:
        return None
    num_open = len(sessions) - len(opening)
    num_batches = max(1, min(_BATCHES_BETWEEN_CHUNKS, num_open // len(opening)))
    is_due = work.batches_since_chunk >= num_batches or not is_busy
    return opening[0] if is_due else None

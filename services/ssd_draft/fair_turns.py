"""Which link a draft works for next: the one with the least virtual time. No clock, no I/O.

This is start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with measured seconds as the
cost of a turn. The virtual time of a link is the time that it has used, but time for which it did
not wait for a turn counts as used. A link that waits gets at least an equal share of the time. One
that needs less, for example for one session, waits for little more than the turn that runs.

*Decision*: a turn, and so a batch of tables, belongs to one link. *Because*: the tables of a batch
grow together, so a session that shares it with 15 sessions of another target waits for the steps of
all 16. *Not chosen*: batches over links, which save passes where commits of several targets arrive
during the same step. *Revisit when* a GPU on which a step of 16 sessions takes as long as one of
one session serves several targets and is busy all the time.
"""

from collections.abc import Collection


class FairTurns:
    """The time that each link has used, as virtual time. Step thread only."""

    def __init__(self) -> None:
        self._used_seconds: dict[int, float] = {}
        """Used time by link, the link with the oldest turn first."""
        self._now = 0.0
        """Virtual time: the used time of the link that had the newest turn, at its start."""

    def next(self, waiting: Collection[int]) -> int:
        """Return the link that gets the next turn; of equal links, the one with the oldest turn.

        A link that did not wait for a turn does not save its time up.
        """
        for link in waiting:
            self._used_seconds[link] = max(self._used_seconds.get(link, 0.0), self._now)
        links = [link for link in self._used_seconds if link in waiting]
        chosen = min(links, key=self._used_seconds.__getitem__)
        self._now = self._used_seconds[chosen]
        return chosen

    def add_turn(self, link: int, seconds: float) -> None:
        """Add the duration of a turn."""
        self._used_seconds[link] = self._used_seconds.pop(link) + seconds

    def remove(self, link: int) -> None:
        """Remove a link that has ended."""
        self._used_seconds.pop(link, None)

"""What a target has asked of its drafts lately: sequences, tokens a round, time of a verify."""

import threading
from collections import deque
from dataclasses import dataclass
from statistics import median

WINDOW_SECONDS = 30.0
_PIECE_SECONDS = 1.0
_ROUNDS_KEPT = 256


@dataclass(slots=True)
class _Piece:
    """A stretch of time and the integral of the number over it."""

    begin: float
    end: float
    area: float


class TimeMean:
    """Mean over the last ``WINDOW_SECONDS`` of a number that changes in steps. Any thread.

    Changes within a second share a piece, so that what is kept is bounded however many come.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: deque[_Piece] = deque()
        self._value = 0.0
        self._since: float | None = None

    def note(self, value: float, now: float) -> None:
        """The number is ``value`` from now on."""
        with self._lock:
            if self._since is not None:
                self._add(self._since, now)
            self._value = value
            self._since = now
            while self._pieces and self._pieces[0].end <= now - WINDOW_SECONDS:
                self._pieces.popleft()

    def _add(self, begin: float, end: float) -> None:
        area = self._value * (end - begin)
        newest = self._pieces[-1] if self._pieces else None
        if newest is not None and end - newest.begin <= _PIECE_SECONDS:
            newest.end = end
            newest.area += area
        elif end > begin:
            self._pieces.append(_Piece(begin, end, area))

    def mean(self, now: float) -> float:
        """The mean, over less time if less is known; 0 before the first note."""
        with self._lock:
            if self._since is None:
                return 0.0
            pieces = [*self._pieces, _Piece(self._since, now, self._value * (now - self._since))]
            oldest = now - WINDOW_SECONDS
            seconds = area = 0.0
            for piece in pieces:
                lasting = piece.end - piece.begin
                inside = piece.end - max(piece.begin, oldest)
                if lasting > 0 and inside > 0:
                    seconds += inside
                    area += piece.area * inside / lasting
            return area / seconds if seconds > 0 else self._value


class Demand:
    """What the pool's status tells of rounds. The step thread notes, any thread reads."""

    def __init__(self) -> None:
        self.eligible = TimeMean()
        """Sequences running whose mode may speculate."""
        self._rounds: deque[tuple[int, int]] = deque(maxlen=_ROUNDS_KEPT)
        self._verify_seconds: deque[float] = deque(maxlen=_ROUNDS_KEPT)
        self._round_seconds: deque[float] = deque(maxlen=_ROUNDS_KEPT)

    def note_round(
        self, num_sequences: int, num_tokens: int, verify_seconds: float, round_seconds: float
    ) -> None:
        """A round gave so many sequences so many tokens together, and took so long."""
        self._rounds.append((num_sequences, num_tokens))
        self._verify_seconds.append(verify_seconds)
        self._round_seconds.append(round_seconds)

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a sequence gained in a round, mean of recent rounds; 0 before the first."""
        rounds = self._rounds.copy()
        num_sequences = sum(sequences for sequences, _ in rounds)
        return sum(tokens for _, tokens in rounds) / num_sequences if num_sequences else 0.0

    @property
    def verify_seconds(self) -> float:
        """T_verify, median of recent rounds; 0 before the first."""
        return _median(self._verify_seconds)

    @property
    def efficiency(self) -> float:
        """T_verify / T_round, of medians of recent rounds; 0 before the first."""
        round_seconds = _median(self._round_seconds)
        return self.verify_seconds / round_seconds if round_seconds > 0 else 0.0


def _median(growing: deque[float]) -> float:
    seconds = growing.copy()
    return median(seconds) if seconds else 0.0

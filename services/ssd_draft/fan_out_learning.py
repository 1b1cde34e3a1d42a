"""The fit of the adaptive fan-out in a draft: its metrics, and its file, which outlives a restart.

All links share the fit, so a target with odd outcomes can lower the hit rates of others, within the
bounds of the values. It cannot change a text. The fit runs while the draft waits. A draft that
never waits keeps its values.

The file is written after each ``ROUNDS_BETWEEN_FILES`` rounds and at the end. A file that cannot be
read or written, or that another draft wrote, is logged: the fit then starts anew, or is not kept.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from ssd.observability.log import get_logger
from ssd.observability.metrics import FAN_OUT_ROUNDS, FAN_OUT_VALUE
from ssd.speculation.fan_out import (
    ADAPTIVE,
    Adaptive,
    Candidates,
    FanOutPolicy,
    Float64s,
    make_policy,
)
from ssd.speculation.fan_out_fit import BANDS, NAMES, FanOutFit, Rounds

_log = get_logger(__name__)
ROUNDS_BETWEEN_FILES = 1024
_FILE = "fan_out.json"
_MOST_BYTES = 1 << 16
"""Of the file that are read; it has 3 KB."""


class FanOutLearning:
    """Fits the values of the policy ``adaptive``. Step thread only."""

    def __init__(self, num_branches: int, folder: str = "", weights: str = "") -> None:
        """Construct with the start values; ``load`` reads the file in ``folder``, if that is set.

        ``weights`` is the fingerprint of the draft's weights; a file for others is not used.
        """
        self._num_branches = num_branches
        self._path = Path(folder, _FILE) if folder else None
        self._key = {"weights": weights, "branches": num_branches}
        self._num_kept = 0
        """Rounds of the fit in the newest file."""
        self._fit = FanOutFit(num_branches)
        self._policy = Adaptive(values_of=self._values_of)

    def policy_of(self, name: str) -> FanOutPolicy:
        """Return the policy of ``make_policy``; ``adaptive`` uses the fitted values."""
        return self._policy if name == ADAPTIVE else make_policy(name)

    def load(self) -> None:
        """Read the file, if there is one."""
        if self._path is None:
            return
        try:
            if self._path.exists() and not self._path.is_file():
                # A named pipe would block.
                raise ValueError("it is not a regular file")
            with self._path.open("rb") as file:
                state = json.loads(file.read(_MOST_BYTES))
            if (
                not isinstance(state, dict)
                or {key: state.get(key) for key in self._key} != self._key
            ):
                raise ValueError("it is of another draft, or of another number of branches")
            self._fit = FanOutFit.from_text(json.dumps(state.get("fit")), self._num_branches)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("fan_out_not_read", file=str(self._path), reason=_reason(error))
        self._num_kept = self._num_rounds
        self._publish()

    def add(self, rounds: Rounds) -> None:
        """Add rounds with their outcomes."""
        self._fit.add(rounds)

    def learn(self) -> bool:
        """Fit the rounds that wait; returns False if they are too few. Takes some milliseconds."""
        if not self._fit.learn():
            return False
        self._publish()
        if self._num_rounds - self._num_kept >= ROUNDS_BETWEEN_FILES:
            self.save()
        return True

    def save(self) -> None:
        """Write the file, as a whole or not at all."""
        if self._path is None or self._num_rounds == self._num_kept:
            return
        self._num_kept = self._num_rounds
        part = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A named pipe there would block, and a link would be followed.
            part.unlink(missing_ok=True)
            part.write_text(json.dumps(self._key | {"fit": json.loads(self._fit.to_text())}))
            part.replace(self._path)
        except OSError as error:
            _log.warning("fan_out_not_kept", file=str(self._path), reason=_reason(error))
            with suppress(OSError):
                part.unlink()

    def _values_of(self, candidates: Candidates) -> Float64s:
        return self._fit.values_of(candidates)

    @property
    def _num_rounds(self) -> int:
        return int(self._fit.num_rounds_Z.sum())

    def _publish(self) -> None:
        num_rounds_Z = self._fit.num_rounds_Z.tolist()
        rows = zip(BANDS, self._fit.used_values(), num_rounds_Z, strict=True)
        for band, values_X, num_rounds in rows:
            FAN_OUT_ROUNDS.labels(temperature=band).set(num_rounds)
            for name, value in zip(NAMES, values_X.tolist(), strict=True):
                FAN_OUT_VALUE.labels(temperature=band, value=name).set(value)


def _reason(error: Exception) -> str:
    """Return the cause alone: the text of an error of the system repeats the file."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)

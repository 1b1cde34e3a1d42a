"""How long a target waits for the tables of a link. Pure.

Source: speculation.md, section 7.
"""

from collections import deque
from collections.abc import Collection

import numpy as np

_WINDOW_TABLES = 128
_MIN_TABLES = 16
_REFRESH_TABLES = 8
"""New tables after which the distribution is evaluated again."""
_MARGIN = 1.5
"""Factor on the 95th percentile. Later tables count as lost."""
_SLACK_SECONDS = 0.002
OPENING_SECONDS = 5.0
OPENING_SECONDS_PER_TOKEN = 0.005
"""Slower than any useful draft, also while it serves other sessions: it builds up to four batches
of tables between two chunks of a prompt."""


class TableDeadline:
    """Follows the running distribution of the times from a commit to its table.

    Guarded by the lock of ``DraftPool``.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_WINDOW_TABLES)
        self._num_new = 0
        self.seconds = float("inf")
        """Maximum time from a commit to its table; infinite until 16 tables have arrived."""

    def observe(self, table_seconds: Collection[float]) -> None:
        """Note the times from commits to their tables."""
        self._recent.extend(table_seconds)
        self._num_new += len(table_seconds)
        if len(self._recent) >= _MIN_TABLES and self._num_new >= _REFRESH_TABLES:
            self._num_new = 0
            self.seconds = float(np.quantile(self._recent, 0.95)) * _MARGIN + _SLACK_SECONDS

    def reset(self) -> None:
        """Remove all times: after a round without tables they no longer describe the link."""
        self._recent.clear()
        self.seconds = float("inf")


def opening_seconds(num_tokens: int) -> float:
    """Return the maximum time of an opening before which a draft prefills ``num_tokens``."""
    return OPENING_SECONDS + num_tokens * OPENING_SECONDS_PER_TOKEN

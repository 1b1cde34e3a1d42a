"""What SIGTERM does before a process has anything to drain.

As process 1 of a container a process ignores each signal that it has not asked for: told to leave
while it imports and loads, it would be killed at the end of the grace period. ``__main__`` modules
ask here, before their imports; whoever serves later puts a drain in this one's place.
"""

import os
import signal
from types import FrameType


def end_at_sigterm() -> None:
    """From now on SIGTERM ends the process at once. Main thread."""
    signal.signal(signal.SIGTERM, _end)


def _end(number: int, frame: FrameType | None) -> None:
    """Leave without the interpreter's own farewell: it would wait for imports and other threads.

    With 0, as a drain does: nothing was begun, so nothing failed.
    """
    del number, frame
    os._exit(0)

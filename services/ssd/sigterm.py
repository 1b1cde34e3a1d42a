"""What SIGTERM does before a process has anything to drain.

As process 1 of a container a process ignores each signal that it has not asked for: told to leave
while it imports and loads, it would be killed at the end of the grace period. ``__main__`` modules
ask here, before their imports; whoever serves later puts a drain in this one's place.
"""

import os
import signal
from types import FrameType


def end_at_sigterm(exit_code: int = 0) -> None:
    """From now on SIGTERM ends the process at once. Main thread.

    Args:
        exit_code: 0, as after a drain, of who serves: nothing was begun, so nothing failed.
    """

    def end(number: int, frame: FrameType | None) -> None:
        """Leave without the interpreter's farewell: it would wait for imports and threads."""
        del number, frame
        os._exit(exit_code)

    signal.signal(signal.SIGTERM, end)

"""SIGTERM and SIGINT before a process serves.

Process 1 of a container ignores every signal without a handler. A SIGTERM during its imports or
while it loads would have no effect, and the process would be killed after the grace period.
``__main__`` modules therefore set this handler before their imports. A process that serves
replaces it by a drain.
"""

import os
import signal
from types import FrameType


def end_at_sigterm(exit_code: int = 0, *, also_at_sigint: bool = False) -> None:
    """Let SIGTERM end the process at once. Main thread.

    Args:
        exit_code: 0 for a process that serves, as after a drain: no request was accepted yet.
        also_at_sigint: for a process whose coroutine downloads a model. asyncio would cancel the
            coroutine only at its next ``await``, and the library waits for its threads.
    """

    def end(number: int, frame: FrameType | None) -> None:
        """Exit without the interpreter's shutdown, which would wait for imports and threads."""
        del number, frame
        os._exit(exit_code)

    signal.signal(signal.SIGTERM, end)
    if also_at_sigint:
        signal.signal(signal.SIGINT, end)

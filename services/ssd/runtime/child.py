"""``python -m ssd.runtime.child PARENT MODULE [FLAG ...]``: a module that ends with its parent.

The child first registers for a SIGTERM at the end of its parent (``prctl``). *Not chosen*: the same
call between fork and exec (``preexec_fn``). It needs a real fork, in which gRPC's fork handlers
crash the child of a process with open channels.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> None:
    """Send this process a signal when the thread of the parent that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def main() -> None:
    """Tie this process to its parent, then run the module."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        # The parent ended before ``prctl``.
        sys.exit(1)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

"""``python -m ssd.child PARENT MODULE [FLAG ...]``: run a module that ends when its parent does.

The child asks the kernel itself, before anything else. *Not chosen*: doing so between fork and
exec (``preexec_fn``); that forces a real fork, and gRPC's fork handlers crash the child of a
process with live channels.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Bind this process's life to its parent's, then become the module."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        # The parent ended before the kernel was asked.
        sys.exit(1)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()

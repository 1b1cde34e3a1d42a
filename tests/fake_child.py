"""Logs the events of a process of the product, with links to all its drafts. SIGTERM ends it."""

import json
import os
import signal
import sys
from types import FrameType


def log(event: str, **fields: object) -> None:
    sys.stderr.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stderr.flush()


def leave(_number: int, _frame: FrameType | None) -> None:
    log("stopped")
    sys.exit(0)


def main() -> None:
    signal.signal(signal.SIGTERM, leave)
    flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False))
    sys.stderr.write("a line of some library\n")
    log("listening", grpc=f"a:{int(flags.get('--port', 0)) or os.getpid()}", http="a:2")
    for draft in filter(None, flags.get("--drafts", "").split(",")):
        log("link", draft=draft, state="active")
    log("ready", seconds=0.1)
    signal.pause()


if __name__ == "__main__":
    main()

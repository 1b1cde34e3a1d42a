"""Ports of tests."""

import socket


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])

"""What a process binds to for an address that was asked for."""

import socket

ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - compared with, never a default
"""Either asks for every address of both families, as gRPC takes them: a pod of an IPv6-only cluster
is reached on the one that it has."""


def bindable(host: str) -> tuple[socket.AddressFamily, str]:
    """The family and the address of the socket: of both families where this machine has both."""
    if host in ALL_ADDRESSES:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - was asked for
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), host


def take_both_families(listening: socket.socket) -> None:
    """Have a socket of IPv6 that is not bound yet take IPv4 too, whatever the machine's default."""
    if listening.family == socket.AF_INET6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)

"""Socket addresses: what a process binds for a configured host, and ``host:port``."""

import socket

ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - compared with, never a default
"""Each means all addresses of both families, as in gRPC. So a pod is reachable on the address that
it has, also on an IPv6-only cluster."""


def bindable(host: str) -> tuple[socket.AddressFamily, str]:
    """Return family and address of the socket. It covers both families if the machine has both."""
    if host in ALL_ADDRESSES:
        host = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - configured
    return (socket.AF_INET6 if ":" in host else socket.AF_INET), host


def take_both_families(listening: socket.socket) -> None:
    """Make an unbound IPv6 socket accept IPv4 as well, whatever the default of the machine is."""
    if listening.family == socket.AF_INET6:
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"

"""The tensor channels that a link can use, by the name in the handshake."""

from collections.abc import Callable

from ssd.ports import ByteStream
from ssd.transport.frame import FrameLimits, TensorChannel
from ssd.transport.grpc_channel import GrpcChannel

CHANNELS: dict[str, Callable[[ByteStream, FrameLimits], TensorChannel]] = {"grpc": GrpcChannel}
"""Name to constructor. ``inprocess`` is for tests; no setting selects it."""

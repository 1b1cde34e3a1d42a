"""Which tensor channels a link can be told to use, by the name that the handshake carries."""

from collections.abc import Callable

from ssd.ports import ByteStream
from ssd.transport.frame import FrameLimits, TensorChannel
from ssd.transport.grpc_channel import GrpcChannel

CHANNELS: dict[str, Callable[[ByteStream, FrameLimits], TensorChannel]] = {"grpc": GrpcChannel}
"""Name to constructor; ``inprocess`` is for tests and no setting names it."""

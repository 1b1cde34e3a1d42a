"""Services of a test on a server of the product, on any free port."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ssd.rpc.server import RpcServer
from ssd.v1 import admin_pb2_grpc, generate_pb2_grpc, speculation_pb2_grpc

REGISTER: dict[type, tuple[str, Callable[..., None]]] = {
    generate_pb2_grpc.GenerateServiceServicer: (
        "ssd.v1.GenerateService",
        generate_pb2_grpc.add_GenerateServiceServicer_to_server,
    ),
    speculation_pb2_grpc.SpeculationServiceServicer: (
        "ssd.v1.SpeculationService",
        speculation_pb2_grpc.add_SpeculationServiceServicer_to_server,
    ),
    admin_pb2_grpc.AdminServiceServicer: (
        "ssd.v1.AdminService",
        admin_pb2_grpc.add_AdminServiceServicer_to_server,
    ),
}
"""Name of each service, and the function that registers it."""


@asynccontextmanager
async def serving(*services: object, port: int = 0, **options: Any) -> AsyncIterator[RpcServer]:
    """A running server with these services; its calls are cancelled at the end."""
    server = RpcServer("127.0.0.1", port, **options)
    for service in services:
        name, register = next(REGISTER[kind] for kind in type(service).mro() if kind in REGISTER)
        server.add(name, partial(register, service))
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)

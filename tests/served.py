"""Services of a test on a server of the product, on any free port; a virtual address."""

import asyncio
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


class Service:
    """A Service of Kubernetes: a connection stays with the backend that is first when it opens."""

    def __init__(self, backends: list[str]) -> None:
        self._backends = backends
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "Service":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        """End all connections, and accept no other."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection(*self._backends[0].split(":"))
        self._writers += (writer, to_there)
        for source, sink in ((reader, to_there), (there, writer)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while block := await source.read(1 << 16):
            sink.write(block)
        sink.close()

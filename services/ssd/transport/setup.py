"""Sets up the collective channel of a link: both ends connect, or both use gRPC.

The target names its backends in ``Hello``, and the draft chooses one in ``Welcome``. Each end then
connects on a thread of its own, while ``Rendezvous`` messages pass between them on the stream of
the link, and measures the connection and the stream. An end that is connected, or that cannot
connect, sends its ``ChannelState``; a target also refuses NCCL where it is not faster than the
stream. An end that has failed, or whose peer has, uses gRPC and logs why.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import unquote

from ssd.errors import FrameError, LinkError
from ssd.observability.log import get_logger
from ssd.observability.metrics import CHANNEL_FALLBACKS_TOTAL
from ssd.rpc.link import HANDSHAKE_SECONDS, ChannelStatus, LinkCall, LinkServerCall
from ssd.runtime.threads import in_daemon_thread
from ssd.speculation.table import frame_bytes
from ssd.transport.channel import CollectiveChannel
from ssd.transport.communicator import (
    DRAFT_RANK,
    MUST_BE_FASTER,
    SETUP_SECONDS,
    TARGET_RANK,
    Communicator,
    Place,
    backend,
)
from ssd.transport.probe import ChannelQuality, probe
from ssd.transport.rendezvous import LinkStore
from ssd.types import ChannelState, Rendezvous, Welcome

_log = get_logger(__name__)
COLLECTIVE = "collective"
MAX_REASON_CHARACTERS = 200
"""Longest reason in a message: an error of torch can have a stack trace."""
_MAPPED = "::ffff:"
"""Prefix of an IPv4 address of a socket of both families."""
_Connected = tuple[Communicator, ChannelQuality]


async def set_up_channel(
    call: LinkCall | LinkServerCall, welcome: Welcome, address: str, device: str
) -> ChannelStatus:
    """Set up the channel that a Welcome chose; both ends call it after the Welcome.

    Args:
        call: this end of the link; it uses the channel from now on if both ends are connected.
        welcome: with a backend.
        address: of the peer, as of gRPC.
        device: of this process.

    Raises:
        LinkError: the link is lost.
    """
    rank = TARGET_RANK if isinstance(call, LinkCall) else DRAFT_RANK
    place = Place(rank, device, host_of(address), SETUP_SECONDS[welcome.backend])
    store = LinkStore(lambda key, value: call.send(Rendezvous(key, value)), place.seconds)
    loop = asyncio.get_running_loop()

    def deliver() -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(place.seconds)

    mine = asyncio.ensure_future(
        in_daemon_thread(partial(connect, welcome.backend, store, place, deliver))
    )
    theirs = asyncio.ensure_future(_read_state(call, store))
    error = "cancelled"
    try:
        error = await _outcome(call, mine, theirs, place)
    finally:
        if error:
            store.close("the set-up of the channel was aborted")
            mine.add_done_callback(_release)
        theirs.cancel()
        # Reads its exception: the link may be lost while the set-up is cancelled.
        await asyncio.gather(theirs, return_exceptions=True)
    # The peer may have been silent while it connected.
    call.renew_lease()
    if error:
        CHANNEL_FALLBACKS_TOTAL.labels(backend=welcome.backend).inc()
        _log.warning("channel", peer=address, channel="grpc", reason=error)
        return ChannelStatus(reason=error)
    communicator, quality = mine.result()
    commits = frame_bytes(welcome.max_sessions, welcome.lookahead)
    tables = frame_bytes(welcome.max_sessions * (welcome.branches + 1), welcome.lookahead)
    sizes = (commits, tables) if rank == TARGET_RANK else (tables, commits)
    channel = CollectiveChannel(communicator, call, *sizes)
    channel.open()
    call.use(channel)
    _log.info(
        "channel",
        peer=address,
        channel=COLLECTIVE,
        transport=communicator.transport,
        round_trip_us=round(quality.round_trip_seconds * 1e6),
        grpc_us=round(quality.grpc_seconds * 1e6),
        megabytes_per_second=round(quality.bytes_per_second / 1e6),
    )
    return ChannelStatus(
        name=COLLECTIVE,
        transport=communicator.transport,
        round_trip_seconds=quality.round_trip_seconds,
        bytes_per_second=quality.bytes_per_second,
    )


def connect(name: str, store: LinkStore, place: Place, deliver: Callable[[], object]) -> _Connected:
    """Connect and measure, see ``probe``. Blocks; closing the store ends it.

    Raises:
        LinkError: for any reason of the network or of torch, for example a GPU without memory; or
            the connection is not faster than the gRPC stream of the link.
    """
    try:
        communicator = backend(name).connect(store, place)
        with contextlib.ExitStack() as undo:
            undo.callback(communicator.close)
            store.aborts(communicator.abort)
            quality = probe(communicator, store, place.rank, time.perf_counter, deliver)
            if place.rank == TARGET_RANK and name in MUST_BE_FASTER:
                check_speed(name, quality)
            undo.pop_all()
    except (RuntimeError, OSError, ValueError) as error:
        raise LinkError(f"{name}: {error}"[:MAX_REASON_CHARACTERS]) from None
    return communicator, quality


def check_speed(name: str, quality: ChannelQuality) -> None:
    """Refuse a connection that is not faster than the stream that every link has.

    Raises:
        LinkError: with both round trips.
    """
    if quality.round_trip_seconds >= quality.grpc_seconds:
        raise LinkError(
            f"{name}: a round trip takes {quality.round_trip_seconds * 1e6:.0f} us, over gRPC "
            f"{quality.grpc_seconds * 1e6:.0f} us"
        )


async def _outcome(
    call: LinkCall | LinkServerCall,
    mine: "asyncio.Future[_Connected]",
    theirs: "asyncio.Future[str]",
    place: Place,
) -> str:
    """Wait until both ends are connected, or one has failed; return why, empty if connected.

    Raises:
        LinkError: the link is lost, or the peer sends no state.
    """
    peer = "the draft" if place.rank == TARGET_RANK else "the target"
    both: set[asyncio.Future[Any]] = {mine, theirs}
    await asyncio.wait(both, timeout=place.seconds, return_when=asyncio.FIRST_COMPLETED)
    if not (theirs.done() and theirs.result()):
        # The peer is connected, so this end is soon too; or the time is over.
        await asyncio.wait({mine}, timeout=place.seconds if theirs.done() else 0)
        error = f"not connected within {place.seconds:g} s"
        if mine.done():
            failure = mine.exception()
            if failure is not None and not isinstance(failure, LinkError):
                raise failure
            error = str(failure or "")
        call.send(ChannelState(error))
        if error:
            return error
    try:
        # After its own limit, so that both ends come to the same result.
        async with asyncio.timeout(place.seconds + HANDSHAKE_SECONDS):
            error = await theirs
    except TimeoutError as late:
        raise LinkError(f"{peer} sends no ChannelState") from late
    return f"{peer}: {error}" if error else ""


async def _read_state(call: LinkCall | LinkServerCall, store: LinkStore) -> str:
    """Pass rendezvous entries to the store until the peer sends its state; return its error."""
    while True:
        match await call.receive():
            case None:
                raise LinkError("the peer closed the link while its channel was set up")
            case Rendezvous(key, value):
                store.put(key, value)
            case ChannelState(error):
                return error
            case bytes():
                raise FrameError("a frame before the end of the handshake")
            case _:
                pass


def _release(connecting: "asyncio.Future[_Connected]") -> None:
    """Close a communicator that no link uses."""
    if not connecting.cancelled() and connecting.exception() is None:
        communicator, _ = connecting.result()

        def close() -> None:
            with contextlib.suppress(RuntimeError):  # of a device, which the next link reports
                communicator.close()

        threading.Thread(target=close, daemon=True).start()


def host_of(peer: str) -> str:
    """Return the host of gRPC's ``host:port``, ``ipv4:host:port`` or ``ipv6:[host]:port``."""
    host = unquote(peer).rpartition(":")[0]
    for scheme in ("ipv4:", "ipv6:", "dns:///"):
        host = host.removeprefix(scheme)
    return host.strip("[]").removeprefix(_MAPPED)

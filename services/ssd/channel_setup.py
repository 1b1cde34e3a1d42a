"""The tensor channel of a new link: which one target and draft use, and how they set it up.

The target names the backends of its collective channel in ``Hello``, best first, and the draft
returns those that it has too in ``Welcome``. Both then try them in this order: each end connects on
a thread of its own, while ``Rendezvous`` messages pass between them on the stream of the link, and
measures the connection. If one of them fails or is late, each sends its ``ChannelState`` and reads
that of the other, and both try the next backend. After the last one, the link uses gRPC. The draft
decides: it sends its last ``ChannelState`` when it can receive frames.
"""

import asyncio
import threading
import time
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import unquote

from ssd.errors import HandshakeError, LinkError
from ssd.link_channel import LinkChannel, LinkShape
from ssd.rpc.link import HANDSHAKE_SECONDS, LinkCall, LinkServerCall
from ssd.telemetry import CHANNEL_FALLBACKS_TOTAL, get_logger
from ssd.threads import in_daemon_thread
from ssd.transport.collective_channel import CollectiveChannel
from ssd.transport.communicator import (
    DRAFT_RANK,
    SETUP_SECONDS,
    TARGET_RANK,
    Communicator,
    Place,
    available_backends,
    backend,
)
from ssd.transport.frame import ChannelQuality
from ssd.transport.probe import probe
from ssd.transport.rendezvous import LinkStore
from ssd.types import ChannelState, Hello, Rendezvous, Welcome

_log = get_logger(__name__)
COLLECTIVE = "collective"
MAX_REASON_CHARACTERS = 200
"""Of an error of torch, which can have a stack trace."""
_MAPPED = "::ffff:"
"""Prefix of an IPv4 address of a socket of both families."""


def common_backends(wanted: tuple[str, ...], device: str) -> tuple[tuple[str, ...], str]:
    """Return those of the target's backends that the draft has, and why it has none of them."""
    if not wanted:
        return (), ""
    available = available_backends(device)
    if found := tuple(each for each in dict.fromkeys(wanted) if each in available):
        return found, ""
    mine = ", ".join(available) or "no collective channel"
    return (), f"the draft on {device} has {mine}, the target has {', '.join(wanted)}"


async def offer_channel(
    call: LinkCall, hello: Hello, welcome: Welcome, address: str, *, device: str
) -> LinkChannel:
    """Return the target's end of the channel, after a Welcome.

    Args:
        call: the link.
        hello: with the backends of the target.
        welcome: with the draft's choice.
        address: of the draft, ``host:port``.
        device: of the target.

    Raises:
        HandshakeError: the draft chose a backend that the target does not have, or one twice.
        LinkError: the link is lost.
    """
    shape = LinkShape.of(welcome)
    frames = shape.frames_of(call)
    if not welcome.backends:
        refusal = welcome.backend_refusal or "the draft does not have this channel"
        return _logged(LinkChannel(frames, reason=refusal if hello.backends else ""), address)
    expected = tuple(each for each in hello.backends if each in welcome.backends)
    if welcome.backends != expected:
        raise HandshakeError(
            "backends",
            f"the draft chose {', '.join(welcome.backends)}, this target has "
            f"{', '.join(hello.backends)}",
        )
    errors: list[str] = []
    for name in welcome.backends:
        place = Place(TARGET_RANK, device, host_of(address), SETUP_SECONDS[name])
        async with _Setup(call, name, place, hello.epoch, shape) as setup:
            error = await setup.outcome(needs_theirs=False)
            call.send(ChannelState(error))
            theirs = await setup.their_error()
            error = error or theirs
            if not error:
                return _logged(setup.take(errors), address)
        errors.append(error)
        _note_fallback(name, error, address)
    return _logged(LinkChannel(frames, reason="; ".join(errors)), address)


async def accept_channel(
    call: LinkServerCall, hello: Hello, welcome: Welcome, device: str
) -> LinkChannel:
    """Return the draft's end of the channel, after its Welcome; ``confirm_channel`` follows.

    Raises:
        LinkError: the link is lost.
    """
    shape = LinkShape.of(welcome)
    frames = shape.frames_of(call)
    if not welcome.backends:
        return LinkChannel(frames, reason=welcome.backend_refusal)
    errors: list[str] = []
    for name in welcome.backends:
        place = Place(DRAFT_RANK, device, host_of(call.name), SETUP_SECONDS[name])
        async with _Setup(call, name, place, hello.epoch, shape) as setup:
            error = await setup.outcome(needs_theirs=True)
            if not error:
                return _logged(setup.take(errors), call.name)
            if name != welcome.backends[-1]:
                call.send(ChannelState(error))
                # What the target sends after its state belongs to the next backend.
                await setup.their_error()
        errors.append(error)
        _note_fallback(name, error, call.name)
    found = LinkChannel(frames, reason="; ".join(errors), last_error=errors[-1])
    return _logged(found, call.name)


def confirm_channel(call: LinkServerCall, welcome: Welcome, found: LinkChannel) -> None:
    """Send the target the draft's last state, once the draft can receive frames.

    Raises:
        LinkError: the link is lost.
    """
    if welcome.backends:
        call.send(ChannelState(found.last_error))


class _Connected(NamedTuple):
    communicator: Communicator
    quality: ChannelQuality


class _Setup:
    """One attempt to connect the two ends of a collective channel.

    Asyncio loop, except ``_connect``. Leaving the context releases what was not taken.
    """

    def __init__(
        self,
        call: LinkCall | LinkServerCall,
        name: str,
        place: Place,
        epoch: int,
        shape: LinkShape,
    ) -> None:
        self._call = call
        self._name = name
        self._place = place
        self._epoch = epoch
        is_target = place.rank == TARGET_RANK
        self._peer = "the draft" if is_target else "the target"
        self._outgoing, self._incoming = (
            (shape.commits, shape.tables) if is_target else (shape.tables, shape.commits)
        )
        # An aborted attempt may still send an entry; the next backend must not take it for its own.
        self._prefix = f"{name}/"
        self._store = LinkStore(
            lambda key, value: call.send(Rendezvous(self._prefix + key, value)), place.seconds
        )
        self._lock = threading.Lock()
        self._communicator: Communicator | None = None
        self._is_aborted = False
        self._is_taken = False

    async def __aenter__(self) -> Self:
        self._mine = asyncio.ensure_future(in_daemon_thread(self._connect))
        self._theirs = asyncio.ensure_future(self._read_state())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_taken:
            self._abort()
            self._mine.add_done_callback(_release)
        self._theirs.cancel()
        # Reads its exception too: the link may be lost while the set-up is cancelled.
        await asyncio.gather(self._theirs, return_exceptions=True)

    async def outcome(self, *, needs_theirs: bool) -> str:
        """Wait until both ends are connected, or one has failed; return why, empty if connected.

        Args:
            needs_theirs: wait for the peer's state too.

        Raises:
            LinkError: the link is lost.
        """
        loop = asyncio.get_running_loop()
        seconds = self._place.seconds + (HANDSHAKE_SECONDS if needs_theirs else 0.0)
        deadline = loop.time() + seconds
        pending: set[asyncio.Future[Any]] = {self._mine, self._theirs}
        while not (self._mine.done() and (self._theirs.done() or not needs_theirs)):
            done, pending = await asyncio.wait(
                pending, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                return f"{self._name}: not connected within {seconds:g} s"
            if error := self._error():
                return error
        return self._error()

    async def their_error(self) -> str:
        """Wait for the peer's state; return why it is not connected.

        Raises:
            LinkError: the link is lost, or the peer sends no state.
        """
        try:
            async with asyncio.timeout(self._place.seconds):
                error = await asyncio.shield(self._theirs)
        except TimeoutError as late:
            raise LinkError(f"no ChannelState within {self._place.seconds:g} s") from late
        return f"{self._peer}: {error}" if error else ""

    def take(self, errors: list[str]) -> LinkChannel:
        """Return the channel; this end is connected.

        Args:
            errors: of the backends that were tried before.
        """
        self._is_taken = True
        communicator, quality = self._mine.result()
        channel = CollectiveChannel(communicator, self._outgoing, self._incoming)
        channel.open()
        return LinkChannel(channel, COLLECTIVE, "; ".join(errors), quality=quality)

    def _error(self) -> str:
        if self._mine.done() and (failure := self._mine.exception()) is not None:
            if not isinstance(failure, LinkError):
                raise failure
            return str(failure)
        if self._theirs.done() and (error := self._theirs.result()):
            return f"{self._peer}: {error}"
        return ""

    async def _read_state(self) -> str:
        """Pass rendezvous entries to the store until the peer sends its state."""
        while True:
            message = await self._call.receive()
            match message:
                case None:
                    raise LinkError(f"{self._peer} closed the link while its channel was set up")
                case Rendezvous(key, value) if key.startswith(self._prefix):
                    self._store.put(key.removeprefix(self._prefix), value)
                case ChannelState(error):
                    return error
                case _:
                    pass

    def _abort(self) -> None:
        """End the attempt; its thread ends soon and releases what it has."""
        self._store.close("the set-up of the channel was aborted")
        with self._lock:
            self._is_aborted = True
            if self._communicator is not None:
                self._communicator.abort()

    def _connect(self) -> _Connected:
        """Connect and measure. A thread of its own.

        Raises:
            LinkError: for any reason of the network or of torch, for example a GPU without memory.
        """
        try:
            return self._connected()
        except (RuntimeError, OSError, ValueError) as error:
            raise LinkError(f"{self._name}: {error}"[:MAX_REASON_CHARACTERS]) from None

    def _connected(self) -> _Connected:
        self._compare()
        communicator = backend(self._name).connect(self._store, self._place)
        with self._lock:
            self._communicator = communicator
            if self._is_aborted:
                communicator.abort()
        quality = None
        try:
            quality = probe(communicator, self._place.rank, time.perf_counter)
        finally:
            if quality is None:
                communicator.abort()
                communicator.close()
        return _Connected(communicator, quality)

    def _compare(self) -> None:
        """Compare what both ends must share.

        Raises:
            LinkError: epoch or sizes of frames differ.
        """
        sizes = [f"{each.max_rows}x{each.max_width}" for each in (self._outgoing, self._incoming)]
        rank = self._place.rank
        mine = f"epoch {self._epoch}, commits {sizes[rank]}, tables {sizes[1 - rank]}"
        self._store.set(f"link/{rank}", mine)
        theirs = self._store.get(f"link/{1 - rank}").decode(errors="replace")
        if mine != theirs:
            raise LinkError(f"this end has {mine}; {self._peer} has {theirs}")


def _release(connecting: "asyncio.Future[_Connected]") -> None:
    """Close a communicator that no link uses."""
    if connecting.cancelled() or connecting.exception() is not None:
        return
    communicator = connecting.result().communicator

    def close() -> None:
        communicator.abort()
        communicator.close()

    threading.Thread(target=close, daemon=True).start()


def _note_fallback(name: str, error: str, peer: str) -> None:
    CHANNEL_FALLBACKS_TOTAL.labels(backend=name).inc()
    _log.warning("channel_fallback", peer=peer, backend=name, reason=error)


def _logged(found: LinkChannel, peer: str) -> LinkChannel:
    quality = found.quality
    if quality is None and found.reason:
        _log.warning("channel", peer=peer, channel=found.name, reason=found.reason)
    elif quality is not None:
        _log.info(
            "channel",
            peer=peer,
            channel=found.name,
            transport=found.channel.transport,
            round_trip_us=round(quality.round_trip_seconds * 1e6),
            megabytes_per_second=round(quality.bytes_per_second / 1e6),
        )
    return found


def host_of(peer: str) -> str:
    """Return the host of gRPC's ``host:port``, ``ipv4:host:port`` or ``ipv6:[host]:port``."""
    host = unquote(peer).rpartition(":")[0]
    for scheme in ("ipv4:", "ipv6:", "dns:///"):
        host = host.removeprefix(scheme)
    return host.strip("[]").removeprefix(_MAPPED)

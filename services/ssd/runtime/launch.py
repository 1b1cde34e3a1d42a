"""Starts, monitors and stops a target, its drafts and a gateway as processes of this machine.

Used by the command, the benchmarks and the tests. A child reports its state in JSON log lines
(``ssd.observability.log``): progress, listening, ready, failed.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import takewhile

from ssd import errors
from ssd.engine_settings import EngineSettings
from ssd.errors import InternalError, NotReadyError, SettingsError, SetupError
from ssd.observability.log import Event, parse_event
from ssd.runtime.cpu_plan import CpuPlan, plan_cpus
from ssd.settings import child_environment, find_text
from ssd.tasks import beside

TARGET = "target"
"""Name of the target's process in events and errors."""
LOCAL_DEADLINE_MS = 100.0
"""Table deadline of a target that is started here, in milliseconds. On a shared machine, a thread
can lose its core for tens of milliseconds. With a shorter deadline, three such pauses would open
the circuit breaker. The adaptive deadline makes usual waits much shorter."""
LINK_SECONDS = 10.0
"""Maximum time that the start waits for the links between target and drafts."""
GATEWAY_SECONDS = 15.0
"""Maximum time from a gateway that listens to one that is ready. The target is ready before."""
DRAIN_SECONDS = 5.0
"""Maximum time that streams continue after SIGTERM; short, because a user waits."""
END_SECONDS = 5.0
"""Maximum time from the error of a client to the end of a crashed target."""
STOP_SECONDS = DRAIN_SECONDS + 15.0
"""A child is killed this long after SIGTERM; longer than any drain."""
MAX_OTHER_LINES = 400
"""Maximum number of stored lines that are not events: enough for the stacks of all threads."""
_FAULT_DUMP = "Fatal Python error"
"""Start of the output of ``faulthandler`` after a crash outside Python."""
EventListener = Callable[[str, Event], None]
"""Called with a child's name and each of its events."""


class ChildProcess:
    """One process of the product. Use ``start``, then ``ready``; ``stop`` is idempotent."""

    def __init__(
        self, name: str, module: str, flags: Sequence[str], on_event: EventListener
    ) -> None:
        self.name = name
        self.grpc_address = ""
        self.http_address = ""
        self._module = module
        self._flags = ["--log-format", "json", *flags]
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None]
        """Set with the process."""
        self._listening = asyncio.Event()
        self._ready = asyncio.Event()
        self._other_lines: deque[str] = deque(maxlen=MAX_OTHER_LINES)
        self._failure: SetupError | None = None
        self._reason = ""
        """Why a gateway's target was not ready when it last tried it."""

    @property
    def pid(self) -> int:
        """Process id; only after ``start``."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process; it is not yet listening."""
        self._process = await asyncio.create_subprocess_exec(
            # -P: nothing is imported from the current folder, which can be a folder of a user.
            *(sys.executable, "-P", "-X", "faulthandler", "-m", "ssd.runtime.child"),
            *(str(os.getpid()), self._module, *self._flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
            env=child_environment(),
            # In its own session, the child receives no Ctrl-C; the parent stops it.
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read())

    async def listening(self, timeout_seconds: float = 120.0) -> None:
        """Wait until the addresses are known.

        Raises:
            SetupError: the process ended, or the time-out was reached.
        """
        await self._wait(self._listening, "listening", timeout_seconds)

    async def ready(self, timeout_seconds: float = 1800.0) -> None:
        """Wait until the process serves.

        Raises:
            SetupError: the process ended, or the time-out was reached.
        """
        await self._wait(self._ready, "ready", timeout_seconds)

    async def wait(self) -> int:
        """Wait for the end and read all output; returns the exit code."""
        assert self._process is not None
        code = await self._process.wait()
        # Unlike awaiting the task, this does not cancel it with the caller.
        await asyncio.wait({self._reader})
        return code

    def kill(self) -> None:
        """Kill the process."""
        assert self._process is not None
        self._signal(signal.SIGKILL)

    async def stop(self) -> int:
        """Send SIGTERM, and SIGKILL after ``STOP_SECONDS``; returns the exit code."""
        if self._process is None:
            return 0
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            self.kill()
            code = await self._process.wait()
        await self._reader
        return code

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended.

        Not with ``subprocess``: it would take the exit code of a process that has just ended, and
        asyncio would return 255 for it.
        """
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def failure(self) -> SetupError:
        """Return why the process ended: the error of its ``failed`` event, or its exit code.

        Its stack, or its other output, is a note of the error (``add_note``).
        """
        if self._failure is not None:
            return self._failure
        code = self._process.returncode if self._process is not None else None
        words = [f"{self.name} {ending(code)}"]
        lines = [line for line in self._other_lines if line.strip()]
        # The last line of a traceback is its exception.
        words += list(takewhile(lambda line: not line.startswith(_FAULT_DUMP), lines))[-1:]
        error = SetupError(": ".join(words))
        if lines:
            error.add_note("\n".join((f"{self.name} wrote:", *lines)))
        return error

    async def _wait(self, event: asyncio.Event, what: str, timeout_seconds: float) -> None:
        assert self._process is not None
        async with beside(self._process.wait(), event.wait()) as tasks:
            await asyncio.wait(tasks, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        if event.is_set():
            return
        if self._process.returncode is None:
            reason = f": {self._reason}" if self._reason else ""
            raise SetupError(f"{self.name} was not {what} within {timeout_seconds:g} s{reason}")
        await self._reader
        raise self.failure()

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while raw := await self._next_line(self._process.stderr):
            line = raw.decode(errors="replace").rstrip()
            event = parse_event(line)
            if event is None:
                self._other_lines.append(line)
                continue
            self._take(event)
            self._on_event(self.name, event)

    async def _next_line(self, stream: asyncio.StreamReader) -> bytes:
        """Return the next line, empty at the end; a line over the limit is returned in pieces.

        Reading never stops: a child with a full pipe blocks at its next log line.
        """
        try:
            return await stream.readuntil()
        except asyncio.IncompleteReadError as error:
            return error.partial
        except asyncio.LimitOverrunError as error:
            return await stream.readexactly(error.consumed)

    def _take(self, event: Event) -> None:
        if event.name == "listening":
            self.grpc_address = str(event.fields.get("grpc", ""))
            self.http_address = str(event.fields.get("http", ""))
            self._listening.set()
        elif event.name == "ready":
            self._ready.set()
        elif event.name == "target_not_ready":
            self._reason = str(event.fields.get("reason", ""))
        elif event.name == "failed":
            self._failure = setup_error(self.name, event)


def setup_error(name: str, event: Event) -> SetupError:
    """Return the error of a ``failed`` event of a child.

    A crash becomes a ``SetupError`` that names the exception and its place; its stack is a note.
    """
    fields = event.fields
    message = str(fields.get("message", "failed"))
    kind = getattr(errors, str(fields.get("error")), None)
    if isinstance(kind, type) and issubclass(kind, SetupError):
        return kind(f"{name}: {message}")
    place = f" ({fields['place']})" if fields.get("place") else ""
    error = SetupError(f"{name}: {fields.get('error') or 'error'}: {message}{place}")
    if "stack" in fields:
        error.add_note(f"{name}: {fields['stack']}")
    return error


def ending(code: int | None) -> str:
    """Return how a process ended."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown"
    hint = ", perhaps because memory ran out" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}){hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The processes to start on this machine."""

    target: str = "demo://target"
    draft: str = "demo://draft"
    num_drafts: int = 1
    """Draft processes."""
    is_synchronous: bool = False
    """The target also runs the draft in its own process, for mode SYNCHRONOUS."""
    port: int = 0
    """gRPC port of the target; the drafts use the next ones. 0: any free ports."""
    http_port: int = 0
    """HTTP port of the target; the drafts use the next ones."""
    is_shared: bool = False
    """Other processes call the target too, with the credentials that its settings require. Without,
    only this process calls it, and has no credentials."""
    gateway_port: int | None = None
    """HTTP port of a gateway, 0 for any free port; None: no gateway."""
    common_flags: tuple[str, ...] = ()
    """For target and drafts: ``--lookahead 6``."""
    target_flags: tuple[str, ...] = ()
    draft_flags: tuple[str, ...] = ()
    state_folder: str = ""
    """Folder with a ``state_folder`` for each draft; empty: they keep nothing."""
    allowed_cpus: tuple[int, ...] = field(
        default_factory=lambda: tuple(sorted(os.sched_getaffinity(0)))
    )
    """CPUs of the models."""
    cpus_without_models: tuple[int, ...] = ()
    """CPUs in addition, for threads that run no model."""

    def plan(self) -> CpuPlan:
        """Return the CPUs of each process."""
        return plan_cpus(self.allowed_cpus, self.num_drafts, self.cpus_without_models)


@dataclass(frozen=True, slots=True)
class RunningDeployment:
    """The processes of a deployment that is ready."""

    target: ChildProcess
    drafts: tuple[ChildProcess, ...]
    gateway: ChildProcess | None = None


class LinkWatch:
    """An ``EventListener`` that waits for the links of a target to its drafts."""

    def __init__(self, num_drafts: int, on_event: EventListener) -> None:
        self._num_drafts = num_drafts
        self._on_event = on_event
        self._active: set[str] = set()
        self._refusal: SettingsError | None = None
        self._settled = asyncio.Event()
        self._check_settled()

    def __call__(self, name: str, event: Event) -> None:
        """Forward an event, and record the links of the target."""
        self._on_event(name, event)
        if event.name != "link" or name != TARGET:
            return
        state, address = event.fields.get("state"), str(event.fields.get("draft"))
        if state == "active":
            self._active.add(address)
        elif state == "refused":
            field, _, problem = str(event.fields.get("reason")).partition(": ")
            self._refusal = SettingsError(
                f"target and draft do not match in {field.replace('_', ' ')}: {problem}; "
                "they need the same tokenizer, lookahead and branches"
            )
        else:
            self._active.discard(address)
        self._check_settled()

    async def linked(self, timeout_seconds: float) -> None:
        """Wait until all drafts are linked, or for the time-out, since drafts only add speed.

        Raises:
            SettingsError: target and draft do not match.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._settled.wait()
        if self._refusal is not None:
            raise self._refusal

    def _check_settled(self) -> None:
        if self._refusal is not None or len(self._active) >= self._num_drafts:
            self._settled.set()


@contextlib.asynccontextmanager
async def deployed(
    deployment: Deployment, on_event: EventListener = lambda _name, _event: None
) -> AsyncIterator[RunningDeployment]:
    """Run a target, its drafts and its gateway. Inside, all are ready; afterwards, all are stopped.

    The start waits up to ``LINK_SECONDS`` for links, so that the first request can use drafts.

    Raises:
        SetupError: a process could not start, with its own message; target and draft do not match;
            the target ended while a client used it; or it would refuse this process.
    """
    if not deployment.is_shared:
        _refuse_credentials()
    plan = deployment.plan()
    drafts = [
        draft_process(deployment, plan, index, on_event) for index in range(deployment.num_drafts)
    ]
    started: list[ChildProcess] = []
    try:
        for draft in drafts:
            started.append(draft)
            await draft.start()
        await asyncio.gather(*(draft.listening() for draft in drafts))
        addresses = [draft.grpc_address for draft in drafts]
        links = LinkWatch(deployment.num_drafts, on_event)
        target = _target_process(deployment, plan, addresses, links)
        started.append(target)
        await target.start()
        await asyncio.gather(*(child.ready() for child in started))
        await links.linked(LINK_SECONDS)
        gateway = None
        if deployment.gateway_port is not None:
            gateway = gateway_process(target.grpc_address, on_event, port=deployment.gateway_port)
            started.append(gateway)
            await gateway.start()
            await _ready_beside(gateway, target)
        try:
            yield RunningDeployment(target, tuple(drafts), gateway)
        except (NotReadyError, InternalError) as error:
            # The error of a client does not contain the cause; the target's exit does.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_SECONDS):
                    await target.wait()
                    raise target.failure() from error
            raise
    finally:
        stops = [child.stop() for child in reversed(started)]
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


async def _ready_beside(gateway: ChildProcess, target: ChildProcess) -> None:
    """Wait until a gateway is ready, which it never is without its target.

    Raises:
        SetupError: the gateway could not start or use the target, or the target has ended.
    """

    async def start() -> None:
        await gateway.listening()
        await gateway.ready(GATEWAY_SECONDS)

    async with beside(start(), target.wait()) as (ready, ended):
        await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            raise target.failure()
        ready.result()


def _refuse_credentials() -> None:
    """Check that a target that is started here accepts calls in plain text and without a token.

    Raises:
        SettingsError: names the variables with which it does not.
    """
    secured = [
        f"SSD_TARGET_{name.upper()}"
        for name in ("tls_certificate", "token_file")
        if find_text(name, (), prefix="SSD_TARGET")
    ]
    if secured:
        raise SettingsError(
            f"a temporary target has no TLS and no tokens, but the environment contains "
            f"{' and '.join(secured)}: remove them from it, or call a running target ('ssd up')"
        )


def draft_process(
    deployment: Deployment,
    plan: CpuPlan,
    index: int,
    on_event: EventListener,
    *,
    port: int | None = None,
) -> ChildProcess:
    """Return the draft with this index, not started.

    ``port`` overrides the port of the deployment, so that a replacement can reuse an address.
    """
    if port is None:
        port = deployment.port + 1 + index if deployment.port else 0
    own_state = deployment.state_folder and f"{deployment.state_folder}/{index}"
    return ChildProcess(
        f"draft {index}",
        "ssd_draft",
        [
            *("--model", deployment.draft),
            *("--port", str(port)),
            *("--http-port", str(deployment.http_port + 1 + index if deployment.http_port else 0)),
            *_cpu_flags(plan.drafts[index], plan.others),
            *("--drain-seconds", str(DRAIN_SECONDS)),
            *deployment.common_flags,
            *_link_flags(deployment),
            f"--state-folder={own_state}",
            *deployment.draft_flags,
        ],
        on_event,
    )


def _link_flags(deployment: Deployment) -> list[str]:
    """Return lookahead, branches and channel of a draft, which are the values of its target."""
    flags = (*deployment.common_flags, *deployment.target_flags)
    defaults = {item.name: str(item.default) for item in fields(EngineSettings)}
    defaults["channel"] = "grpc"
    names = ("lookahead", "branches", "channel")
    values = {name: _of_target(name, defaults[name], flags) for name in names}
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def _of_target(name: str, default: str, flags: Sequence[str] = ()) -> str:
    """Return a setting of the target: of its flags, else of the environment, else the default."""
    return find_text(name, flags, prefix="SSD_TARGET", default=default)


def gateway_process(target: str, on_event: EventListener, *, port: int) -> ChildProcess:
    """Return the gateway of a target's gRPC address, not started; port 0 is any free port."""
    flags = ("--targets", target, "--port", str(port), "--drain-seconds", str(DRAIN_SECONDS))
    return ChildProcess("gateway", "ssd_gateway", flags, on_event)


def _target_process(
    deployment: Deployment, plan: CpuPlan, drafts: Sequence[str], on_event: EventListener
) -> ChildProcess:
    return ChildProcess(
        TARGET,
        "ssd_target",
        [
            *("--model", deployment.target),
            *("--port", str(deployment.port)),
            *("--http-port", str(deployment.http_port)),
            *(("--drafts", ",".join(drafts)) if drafts else ()),
            *(("--draft-model", deployment.draft) if deployment.is_synchronous else ()),
            *_cpu_flags(plan.target, plan.others),
            *("--drain-seconds", str(DRAIN_SECONDS)),
            *("--draft-deadline-ms", _of_target("draft_deadline_ms", str(LOCAL_DEADLINE_MS))),
            *deployment.common_flags,
            *deployment.target_flags,
        ],
        on_event,
    )


def _cpu_flags(step_cpus: str, other_cpus: str) -> list[str]:
    threads = len(step_cpus.split(","))
    return ["--cpus", step_cpus, "--io-cpus", other_cpus, "--threads", str(threads)]

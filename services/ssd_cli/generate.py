"""``ssd generate``: continuations of one prompt, from a running target or from a temporary one."""

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import typer

from ssd.errors import NotReadyError, SSDError
from ssd.rpc.client import READY_SECONDS, TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.rpc.credentials import NO_CREDENTIALS, ClientCredentials
from ssd.runtime.launch import Deployment, deployed
from ssd.types import Mode
from ssd_cli.display import err, print_table, report, startup_progress, summary, write
from ssd_cli.figures import Collector, Generation, beside_request, why_not_speculative

HINT_ROUNDS = 20
"""Number of rounds from which a text without a hit gets a hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """The target of a continuation."""

    endpoint: str | None = None
    """Address of a running target; None: start ``deployment`` and stop it afterwards."""
    deployment: Deployment
    wait_seconds: float = READY_SECONDS
    """Maximum time to wait until a running target is ready."""
    credentials: ClientCredentials = NO_CREDENTIALS
    """Credentials for a running target."""
    is_quiet: bool = False
    """Show no progress and no hints, for output that a machine reads."""


async def generate(options: GenerateOptions, call: GenerateCall, collector: Collector) -> str:
    """Continue a prompt; return a hint if no round was a hit, else an empty string.

    ``collector`` receives each chunk, also those before an error or a cancellation. The first text
    is written as it arrives. Quiet output has nothing but, after an error, the partial object.

    Raises:
        SSDError: the processes cannot start, or the request fails.
    """
    on_text = (lambda _text: None) if options.is_quiet else write
    try:
        async with connected(options) as client:
            await stream(client, call, collector, on_text)
            return "" if options.is_quiet else await _hint(client, call.mode, collector)
    except SSDError as error:
        if collector.has_tokens:
            write(json_line(collector.partial(str(error))) if options.is_quiet else "\n")
        raise


async def _hint(client: TargetClient, mode: Mode, collector: Collector) -> str:
    figures = collector.finish().figures
    uses_tables = mode not in (Mode.AUTOREGRESSIVE, Mode.SYNCHRONOUS)
    needs_tables = figures.misses or figures.late or not figures.backup_rounds
    is_used = figures.hits or not needs_tables
    if not uses_tables or is_used or (figures.rounds or 0) < HINT_ROUNDS:
        return ""
    try:
        links = (await client.pool_status()).links
    except SSDError:
        # The text is complete, so an error of this second call is not reported.
        return ""
    # In AUTO mode, a target without drafts is not expected to speculate.
    if mode is Mode.AUTO and not links:
        return ""
    missing = "a hit" if figures.misses or figures.late else "speculative"
    return f"no round was {missing}: {why_not_speculative(figures, links)}"


async def stream(
    client: TargetClient,
    call: GenerateCall,
    collector: Collector,
    on_text: Callable[[str], None],
) -> None:
    """Continue a prompt on a target; ``on_text`` receives each new piece of the first text.

    Raises:
        SSDError: the request fails.
    """
    collector.start()
    async for chunk in client.generate(call):
        collector.add(chunk)
        if chunk.choice == 0:
            on_text(chunk.text)


@contextlib.asynccontextmanager
async def connected(options: GenerateOptions) -> AsyncIterator[TargetClient]:
    """Yield a client of the target, which is started first if it does not run.

    Raises:
        SSDError: the processes cannot start.
    """
    if options.endpoint is not None:

        def show_wait(reason: NotReadyError) -> None:
            if not options.is_quiet:
                report("waiting", f"{reason}; waiting at most {options.wait_seconds:g} s")

        async with TargetClient(
            options.endpoint,
            credentials=options.credentials,
            ready_seconds=options.wait_seconds,
            on_wait=show_wait,
        ) as client:
            yield client
        return
    async with contextlib.AsyncExitStack() as stack:
        with startup_progress(is_quiet=options.is_quiet) as on_event:
            running = await stack.enter_async_context(deployed(options.deployment, on_event))
        # No other process restarts this target, so the client does not wait for it.
        client = TargetClient(running.target.grpc_address, ready_seconds=0)
        yield await stack.enter_async_context(client)


def read_prompt(text: str) -> str:
    """Return the prompt; read it from standard input if it is ``-``.

    Raises:
        typer.BadParameter: it is empty or not UTF-8.
    """
    try:
        prompt = sys.stdin.read() if text == "-" else text
        prompt.encode()
    except UnicodeError:
        raise typer.BadParameter("the prompt is not UTF-8") from None
    if not prompt:
        raise typer.BadParameter("the prompt is empty")
    return prompt


def show_generation(
    result: Generation, requested: Mode, *, is_json: bool, shows_seed: bool
) -> None:
    """Print what follows the text: the other texts, and the figures."""
    if is_json:
        write(json_line(result))
        return
    write("\n")
    texts = [result, *result.others]
    for number, other in enumerate(texts[1:], start=2):
        write(f"\n--- {number} of {len(texts)} ---\n{other.text}\n")
    titles = [str(number) for number in range(1, 1 + len(texts))] if result.others else [""]
    columns = [
        (title, beside_request(text.figures, requested))
        for title, text in zip(titles, texts, strict=True)
    ]
    print_table(err, summary(columns, shows_seed=shows_seed))


def json_line(result: Generation) -> str:
    """Return the object that ``--json`` prints."""
    return json.dumps(result.as_json()) + "\n"

"""The commands: convert flags to options, print results, print errors on one line."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

import ssd
from ssd.console import run_app
from ssd.rpc.client import READY_SECONDS, TargetClient
from ssd.rpc.codec import WHOLE_TEXT_MS, GenerateCall
from ssd.runtime.cpu_plan import one_cpu_a_core
from ssd.runtime.launch import Deployment
from ssd.types import Mode, SamplingParams
from ssd_cli.chat import ChatSettings, chat
from ssd_cli.check import check
from ssd_cli.commands import (
    check_extras,
    check_folder,
    check_models,
    debug_of_app,
    program,
    run_work,
)
from ssd_cli.demo import demo
from ssd_cli.display import err, out, print_table, report, status, write
from ssd_cli.figures import Collector
from ssd_cli.generate import GenerateOptions, generate, read_prompt, show_generation
from ssd_cli.line_input import open_lines
from ssd_cli.models import AutoPrecision, auto_precision, local_models, models_in, models_table
from ssd_cli.options import (
    Access,
    Debug,
    Drafts,
    Endpoint,
    Json,
    MaxTokens,
    Numerics,
    Pair,
    Places,
    Processes,
    Seed,
    Shape,
    Target,
    Temperature,
    Wait,
    check_flags,
    with_flags,
)
from ssd_cli.plan_command import plan_command
from ssd_cli.pool_view import show_pool
from ssd_cli.sampling_options import Priority, Sampling
from ssd_cli.up import GATEWAY_PORT, check_overlaps, up

app = typer.Typer(
    name="ssd",
    help="Speculative speculative decoding: the text of the target, generated faster.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
PROGRAM = "import sys; from {}.__main__ import main; sys.exit(main(sys.argv[2:], sys.argv[1]))"
"""Program that runs a package as ``python -m``, with the name of this command in usage errors."""


def _show_version(is_requested: bool) -> None:  # noqa: FBT001
    if is_requested:
        out.print(ssd.__version__)
        raise typer.Exit


@app.callback()
def common(
    *,
    debug: Debug = False,
    version: Annotated[  # noqa: ARG001 - read by its callback
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Read the flags that all commands share."""
    debug_of_app.set(debug)


@app.command("generate")
@with_flags
def generate_command(
    context: typer.Context,
    prompt: Annotated[
        str,
        typer.Argument(
            help="The prompt; - reads it from standard input. If it begins with -, write all "
            "options, then --, then the prompt."
        ),
    ],
    *,
    endpoint: Endpoint = None,
    wait_seconds: Wait = READY_SECONDS,
    access: Access,
    processes: Processes,
    sampling: Sampling,
    seed: Seed = None,
    max_tokens: MaxTokens = 128,
    priority: Priority = 0,
    is_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a prompt.

    With --json, print one object: text, token_ids, finish_reason, statistics,
    logprobs with --logprobs, and choices (the other texts) with --n.
    After Ctrl-C, finish_reason is cancelled. After an error it is failed, and
    error is the message. In both cases, statistics contains only what this
    command measured. Without a token, no object is printed.
    """
    check_flags(context, endpoint)
    if sampling.logprobs is not None and not is_json:
        raise typer.BadParameter("--logprobs needs --json")
    call = GenerateCall(
        prompt=read_prompt(prompt),
        sampling=sampling.params(seed=seed, max_tokens=max_tokens),
        mode=Mode(processes.mode),
        priority=priority,
        message_interval_ms=WHOLE_TEXT_MS if is_json else 0,
    )
    options = GenerateOptions(
        endpoint=endpoint,
        wait_seconds=wait_seconds,
        credentials=access.credentials(endpoint),
        deployment=processes.deployment(),
        is_quiet=is_json,
    )
    if endpoint is None:
        check_models(options.deployment)
    collector = Collector(is_echo=sampling.echo)
    shows_seed = sampling.temperature > 0
    show = partial(show_generation, requested=call.mode, is_json=is_json, shows_seed=shows_seed)
    try:
        hint = run_work(generate(options, call, collector), is_debug=debug)
    except KeyboardInterrupt:
        if collector.has_tokens:
            show(collector.partial())
        else:
            report("cancelled", "no token arrived, so there are no statistics")
        raise
    show(collector.finish())
    if hint:
        report("hint", hint)


@app.command("up")
@with_flags
def up_command(
    *,
    processes: Processes,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65000, help="gRPC port of the target; drafts use the next ports; 0: any."
        ),
    ] = 50051,
    http_port: Annotated[
        int,
        typer.Option(
            min=0, max=65000, help="HTTP port of the target; drafts use the next ports; 0: any."
        ),
    ] = 9090,
    gateway: Annotated[
        bool,
        typer.Option(
            "--gateway",
            help="Also start a gateway: an OpenAI-compatible API, and a playground at /.",
        ),
    ] = False,
    gateway_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"With --gateway: its HTTP port; default: {GATEWAY_PORT}; 0: any.",
        ),
    ] = None,
    is_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a target and its drafts on this machine until Ctrl-C."""
    if gateway_port is None:
        gateway_port = GATEWAY_PORT
    elif not gateway:
        raise typer.BadParameter("--gateway-port needs --gateway")
    deployment = processes.deployment(
        port=port,
        http_port=http_port,
        is_shared=True,
        gateway_port=gateway_port if gateway else None,
    )
    check_overlaps(deployment)
    check_models(deployment)
    raise typer.Exit(run_work(up(deployment, is_json=is_json), is_debug=debug))


@dataclass(frozen=True, kw_only=True)
class WidenedPair(Pair):
    """The embedded pair, whose target is slow enough that a verify hides the draft."""

    target: Target = "demo://target?widen=2"


@app.command("demo")
@with_flags
def demo_command(
    *,
    pair: WidenedPair,
    temperature: Temperature = 0.0,
    seed: Seed = 7,
    max_tokens: Annotated[int, typer.Option(min=2, help="Number of new tokens.")] = 200,
    shape: Shape,
    numerics: Numerics,
    debug: Debug = False,
) -> None:
    """Generate one text twice, plain and speculative, and compare."""
    # One core for each model, so that both modes have the same target.
    cores = one_cpu_a_core(os.sched_getaffinity(0))
    deployment = Deployment(
        target=pair.target,
        draft=pair.draft,
        common_flags=(*shape.shape_flags, *numerics.numeric_flags),
        allowed_cpus=cores[:2],
        cpus_without_models=cores[2:],
    )
    check_models(deployment)
    sampling = SamplingParams(
        temperature=temperature, ignore_eos=True, seed=seed, max_tokens=max_tokens
    )
    run_work(demo(deployment, sampling), is_debug=debug)


@app.command("models")
def models_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders with models.", exists=True, file_okay=False),
    ] = None,
    *,
    is_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
    debug: Debug = False,
) -> None:
    """List the embedded pair and the models in folders and in the hub's cache.

    Exit code 1 if a model cannot run.
    """
    check_extras("engine")
    models = local_models(folders or [])
    if not is_json:
        print_table(out, models_table(models))
        for model in models:
            if model.problem:
                report("warning", model.problem)
        for folder in folders or []:
            if not models_in(folder):
                report("warning", f"{folder} contains no models")
    with status("checking bfloat16 on this machine"):
        precision: AutoPrecision = run_work(auto_precision(), is_debug=debug)
    if is_json:
        records = [asdict(model) | asdict(precision) for model in models]
        write(json.dumps(records) + "\n")
    else:
        err.print(f"--dtype auto is {precision.dtype} on this machine: {precision.dtype_reason}")
    if any(model.problem for model in models):
        raise typer.Exit(1)


_OTHER_FLAGS: dict[str, Any] = {
    "context_settings": {"ignore_unknown_options": True, "allow_extra_args": True},
    "add_help_option": False,
}
"""Settings of commands whose flags another package has."""


@app.command("bench", **_OTHER_FLAGS)
def bench_command(context: typer.Context) -> None:
    """Measure plain and speculative decoding in one run; its --help lists the flags."""
    check_extras("engine")
    _become("ssd_bench", context)


@app.command("distill", **_OTHER_FLAGS)
def distill_command(context: typer.Context) -> None:
    """Train a draft towards its target; its --help lists the flags."""
    # Its help needs none of them.
    if "--help" not in context.args:
        check_extras("engine", "distill")
    _become("ssd_distill", context)


def _become(package: str, context: typer.Context) -> None:
    """Replace this process by one of a package that needs torch. Ctrl-C reaches it alone.

    It imports nothing from the current folder (``-P``), as this process does not.
    """
    check_folder()
    debug = ["--debug"] if debug_of_app.get() else []
    words = [f"{program()} {context.info_name}", *debug, *context.args]
    code = PROGRAM.format(package)
    os.execv(sys.executable, [sys.executable, "-P", "-c", code, *words])  # noqa: S606 - our interpreter


@dataclass(frozen=True, kw_only=True)
class CheckedPair(Pair):
    """The embedded pair with a target of the usual size of a small model."""

    target: Target = "demo://target?widen=4"


@app.command("check")
@with_flags
def check_command(
    *,
    pair: CheckedPair,
    batch: Annotated[
        int, typer.Option(min=1, max=64, help="Texts at a time, half of them at temperature 1.")
    ] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="Number of new tokens.")] = 48,
    numerics: Numerics,
    places: Places,
    is_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare the texts of plain and speculative decoding, several at a time.

    The exit code is 1 if a text differs.
    """
    deployment = Deployment(
        target=pair.target,
        draft=pair.draft,
        common_flags=numerics.numeric_flags,
        target_flags=("--max-num-seqs", str(max(16, batch)), *places.target_flags),
        draft_flags=places.draft_flags,
    )
    check_models(deployment)
    run_work(check(deployment, batch, max_tokens, is_json=is_json), is_debug=debug)


@app.command("chat")
@with_flags
def chat_command(
    context: typer.Context,
    *,
    endpoint: Endpoint = None,
    access: Access,
    pair: Pair,
    drafts: Drafts,
    temperature: Temperature = 1.0,
    seed: Seed = None,
    max_tokens: MaxTokens = 512,
    shows_metrics: Annotated[
        bool, typer.Option("--metrics", help="Print one line of figures after each answer.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Chat with a model.

    /help lists the commands. Ctrl-C stops an answer, Ctrl-D at the prompt ends
    the program.
    Without a terminal, each line of standard input is a message or a command;
    the exit code is 1 if one of them had an error.
    """
    check_flags(context, endpoint)
    # The draft is also in the process of the target, for /mode synchronous.
    deployment = Deployment(
        target=pair.target, draft=pair.draft, num_drafts=drafts.num_drafts, is_synchronous=True
    )
    options = GenerateOptions(
        endpoint=endpoint, credentials=access.credentials(endpoint), deployment=deployment
    )
    if endpoint is None:
        check_models(deployment)
    settings = ChatSettings(
        mode=Mode(drafts.mode), temperature=temperature, seed=seed, max_tokens=max_tokens
    )
    lines = open_lines(sys.stdin.fileno())
    work = chat(options, settings, lines, shows_metrics=shows_metrics)
    raise typer.Exit(run_work(work, is_debug=debug))


@app.command("pool")
@with_flags
def pool_command(
    *,
    endpoint: Annotated[
        str, typer.Option("--endpoint", "--address", help="Address of a running target.")
    ] = "127.0.0.1:50051",
    access: Access,
    is_once: Annotated[bool, typer.Option("--once", help="Print the present state.")] = False,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print the present state as one JSON object.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Show the drafts of a target: sessions, links, hit rates, and whether it speculates.

    The view changes with the pool until Ctrl-C. Redirected output has the
    present state only.
    """
    credentials = access.credentials(endpoint)
    client = TargetClient(endpoint, credentials=credentials, ready_seconds=0)
    run_work(show_pool(client, is_json=is_json, is_once=is_once), is_debug=debug)


app.command("plan")(plan_command)


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code.

    Args:
        argv: the arguments without the program name; None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    return run_app(app, words, program())

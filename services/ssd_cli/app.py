"""The commands: convert flags to options, print results, print errors on one line."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

import ssd
from ssd.console import style_help
from ssd.cpu_plan import one_cpu_a_core
from ssd.errors import SSDError
from ssd.launch import Deployment
from ssd.rpc.client import READY_SECONDS
from ssd.rpc.codec import GenerateCall
from ssd.rpc.credentials import NO_CREDENTIALS, TlsFiles
from ssd.types import Mode, SamplingParams
from ssd_cli.chat_command import chat_command
from ssd_cli.check import check_command
from ssd_cli.commands import (
    check_drafts,
    check_extras,
    check_models,
    debug_of_app,
    processes_of,
    run_work,
    warn_about_one_cpu,
)
from ssd_cli.demo import DemoOptions, demo
from ssd_cli.display import err, out, print_table, report, status, write
from ssd_cli.figures import Collector
from ssd_cli.generate import (
    GenerateOptions,
    check_endpoint,
    generate,
    json_line,
    read_prompt,
    show_generation,
)
from ssd_cli.models import AutoPrecision, auto_precision, local_models, models_in, models_table
from ssd_cli.options import (
    MAX_SEED,
    AllowInsecure,
    Branches,
    Debug,
    Device,
    Draft,
    DraftDevice,
    DraftWeights,
    Dtype,
    Endpoint,
    Engine,
    Json,
    Lookahead,
    MaxTokens,
    ModeOption,
    NumDrafts,
    Seed,
    Target,
    Temperature,
    TensorParallelSize,
    TlsCa,
    TlsCertificate,
    TlsKey,
    TokenFile,
    Weights,
    client_credentials,
    common_flags,
    device_flags,
    refuse_with_endpoint,
    refuse_without_endpoint,
    target_flags,
)
from ssd_cli.plan_command import plan_command
from ssd_cli.pool_command import pool_command
from ssd_cli.sampling_options import (
    Echo,
    FrequencyPenalty,
    IgnoreEos,
    JsonSchema,
    LogitBias,
    Logprobs,
    MinP,
    MinTokens,
    NumTexts,
    PresencePenalty,
    Priority,
    Regex,
    RepetitionPenalty,
    StopTokenId,
    TopK,
    TopP,
    checked,
    logit_biases,
    schema_text,
)
from ssd_cli.up import up

app = typer.Typer(
    name="ssd",
    help="Speculative speculative decoding: the text of the target, generated faster.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
BENCH = "import sys; from ssd_bench.__main__ import main; sys.exit(main(prog_name='ssd bench'))"
"""Like ``python -m ssd_bench``, with the name ``ssd bench`` in usage errors."""
_TYPER_PREFIX = re.compile(r"^Invalid value(?: for '([^']+)')?: (?:Value error, )?")
_TYPER_RANGE = re.compile(r"\bInput should be (less|greater) than or equal to\b")
"""Words of a number out of its range; the gateway has the same replacement."""


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
    wait_seconds: Annotated[
        float,
        typer.Option(
            "--wait",
            min=0.0,
            max=86400.0,
            help="With --endpoint: maximum time to wait for a ready target, in seconds.",
        ),
    ] = READY_SECONDS,
    tls_ca: TlsCa = "",
    tls_certificate: TlsCertificate = "",
    tls_key: TlsKey = "",
    token_file: TokenFile = "",
    allow_insecure: AllowInsecure = False,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    mode: ModeOption = "auto",
    seed: Seed = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    max_tokens: MaxTokens = 128,
    min_tokens: MinTokens = 0,
    ignore_eos: IgnoreEos = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; can be repeated.")
    ] = None,
    stop_token_id: StopTokenId = None,
    logit_bias: LogitBias = None,
    json_schema: JsonSchema = None,
    regex: Regex = "",
    n: NumTexts = 1,
    echo: Echo = False,
    logprobs: Logprobs = None,
    priority: Priority = 0,
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    num_drafts: NumDrafts = 1,
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    draft_weights: DraftWeights = "auto",
    engine: Engine = "auto",
    device: Device = "",
    draft_device: DraftDevice = "",
    tensor_parallel_size: TensorParallelSize = 1,
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
    credentials = NO_CREDENTIALS
    if endpoint is not None:
        refuse_with_endpoint(context)
        check_endpoint(endpoint)
        tls = TlsFiles(certificate=tls_certificate, key=tls_key, ca=tls_ca)
        credentials = client_credentials(endpoint, tls, token_file, allow_insecure=allow_insecure)
    else:
        refuse_without_endpoint(context)
    if logprobs is not None and not is_json:
        raise typer.BadParameter("--logprobs needs --json")
    check_drafts(mode, num_drafts)
    call = GenerateCall(
        prompt=read_prompt(prompt),
        sampling=checked(
            SamplingParams(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                repetition_penalty=repetition_penalty,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                min_tokens=min_tokens,
                ignore_eos=ignore_eos,
                stop=tuple(stop or ()),
                stop_token_ids=tuple(stop_token_id or ()),
                logit_bias=logit_biases(logit_bias),
                json_schema=schema_text(json_schema, regex),
                regex=regex,
                n=n,
                echo=echo,
                logprobs=logprobs,
                seed=seed,
                max_tokens=max_tokens,
            )
        ),
        mode=Mode(mode),
        priority=priority,
    )
    options = GenerateOptions(
        endpoint=endpoint,
        wait_seconds=wait_seconds,
        credentials=credentials,
        deployment=Deployment(
            target=target,
            draft=draft,
            num_drafts=processes_of(mode, num_drafts),
            is_synchronous=mode == "synchronous",
            common_flags=common_flags(lookahead, branches, dtype, engine),
            target_flags=target_flags(tensor_parallel_size, weights, draft_weights, device),
            draft_flags=("--weights", draft_weights, *device_flags(draft_device or device)),
        ),
        is_quiet=is_json,
    )
    if endpoint is None:
        check_models(options.deployment, tensor_parallel_size)
        warn_about_one_cpu(options.deployment)
    collector = Collector(is_echo=echo)
    show = partial(show_generation, is_json=is_json, shows_seed=temperature > 0)
    try:
        hint = run_work(_generated(options, call, collector, is_json=is_json), is_debug=debug)
    except KeyboardInterrupt:
        if collector.token_ids:
            show(collector.partial())
        else:
            report("cancelled", "no token arrived, so there are no statistics")
        raise
    show(collector.finish())
    if hint:
        report("hint", hint)


async def _generated(
    options: GenerateOptions, call: GenerateCall, collector: Collector, *, is_json: bool
) -> str:
    """Generate; after an error, end the partial text or print the partial object."""
    try:
        # --json prints the text in its object.
        on_text = (lambda _text: None) if is_json else write
        return await generate(options, call, collector, on_text)
    except SSDError as error:
        if collector.token_ids:
            write(json_line(collector.partial(str(error))) if is_json else "\n")
        raise


@app.command("up")
def up_command(
    *,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    num_drafts: NumDrafts = 1,
    mode: ModeOption = "auto",
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    dtype: Dtype = "auto",
    weights: Weights = "auto",
    draft_weights: DraftWeights = "auto",
    engine: Engine = "auto",
    device: Device = "",
    draft_device: DraftDevice = "",
    tensor_parallel_size: TensorParallelSize = 1,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65000, help="gRPC port of the target; drafts use the next ports; 0: any."
        ),
    ] = 50051,
    http_port: Annotated[
        int,
        typer.Option(
            "--http-port",
            min=0,
            max=65000,
            help="HTTP port of the target; drafts use the next ports; 0: any.",
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
        int, typer.Option(min=0, max=65535, help="HTTP port of the gateway; 0: any.")
    ] = 8000,
    is_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a target and its drafts on this machine until Ctrl-C."""
    check_drafts(mode, num_drafts)
    if port and http_port and abs(port - http_port) <= num_drafts:
        raise typer.BadParameter(
            f"--port {port} and --http-port {http_port} overlap: {num_drafts + 1} processes use "
            "consecutive ports from each of them"
        )
    deployment = Deployment(
        target=target,
        draft=draft,
        num_drafts=processes_of(mode, num_drafts),
        is_synchronous=mode == "synchronous",
        port=port,
        http_port=http_port,
        is_shared=True,
        gateway_port=gateway_port if gateway else None,
        common_flags=common_flags(lookahead, branches, dtype, engine),
        target_flags=target_flags(tensor_parallel_size, weights, draft_weights, device),
        draft_flags=("--weights", draft_weights, *device_flags(draft_device or device)),
    )
    check_models(deployment, tensor_parallel_size)
    warn_about_one_cpu(deployment)
    work = up(deployment, is_json=is_json, is_debug=debug_of_app.get() or debug)
    raise typer.Exit(run_work(work, is_debug=debug))


@app.command("demo")
def demo_command(
    *,
    target: Target = "demo://target?widen=2",
    draft: Draft = "demo://draft",
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the noise.")] = 7,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=2, help="Number of new tokens.")
    ] = 200,
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    dtype: Dtype = "auto",
    engine: Engine = "auto",
    debug: Debug = False,
) -> None:
    """Generate one text twice, plain and speculative, and compare."""
    # One core for each model, so that both modes have the same target.
    cores = one_cpu_a_core(os.sched_getaffinity(0))
    deployment = Deployment(
        target=target,
        draft=draft,
        common_flags=common_flags(lookahead, branches, dtype, engine),
        allowed_cpus=cores[:2],
        cpus_without_models=cores[2:],
    )
    check_models(deployment)
    warn_about_one_cpu(deployment)
    options = DemoOptions(temperature=temperature, seed=seed, max_tokens=max_tokens)
    run_work(demo(deployment, options), is_debug=debug)


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
        found = [asdict(model) | asdict(precision) for model in models]
        write(json.dumps(found) + "\n")
    else:
        err.print(f"--dtype auto is {precision.dtype} on this machine: {precision.dtype_reason}")
    if any(model.problem for model in models):
        raise typer.Exit(1)


@app.command(
    "bench",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
def bench_command(context: typer.Context) -> None:
    """Measure plain and speculative decoding in one run; its --help lists the flags."""
    check_extras("engine")
    # A separate process, because it needs torch.
    debug = ["--debug"] if debug_of_app.get() else []
    command = [sys.executable, "-c", BENCH, *debug, *context.args]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


app.command("plan")(plan_command)
app.command("check")(check_command)
app.command("chat")(chat_command)
app.command("pool")(pool_command)


@app.command("version")
def version_command() -> None:
    """Print the version."""
    out.print(ssd.__version__)


def _usage_problem(message: str, command: str) -> str:
    """Return typer's message as ``--flag: problem``."""
    if command == "ssd generate" and message.startswith("No such option"):
        return f"{message}; write -- before a prompt that begins with -"
    message = _TYPER_PREFIX.sub(lambda found: f"{found[1]}: " if found[1] else "", message)
    return _TYPER_RANGE.sub(
        lambda found: f"must be at {'most' if found[1] == 'less' else 'least'}", message
    )


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit code.

    Args:
        argv: the arguments without the program name; None: those of this process.
    """
    words = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    style_help()
    try:
        return int(app(words, prog_name="ssd", standalone_mode=False) or 0)
    except TyperException as error:
        # typer's usage message has many lines. The hint names the command that prints it.
        context = getattr(error, "ctx", None)
        command = "ssd" if context is None else context.command_path
        problem = _usage_problem(error.format_message(), command)
        report("error", f"{problem} (see: {command} --help)", "red")
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader closed the pipe. Nothing may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        report("error", f"the output cannot be written: {error.strerror or error}", "red")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1

"""The commands: flags to options, results to the console, errors to one line."""

import asyncio
import json
import sys
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import ssd
from ssd.errors import RequestError, SettingsError, SSDError
from ssd.launch import Deployment
from ssd.rpc.codec import GenerateCall
from ssd.types import Mode, SamplingParams
from ssd_cli.demo import DemoOptions, demo
from ssd_cli.display import err, out, summary
from ssd_cli.generate import GenerateOptions, generate
from ssd_cli.models import local_models, models_table
from ssd_cli.up import up

app = typer.Typer(
    name="ssd",
    help="Speculative speculative decoding: the target's own text, sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Set by the callback, read where an error ends the command.
_debug = False

Target = Annotated[str, typer.Option("--target", help="Model folder, demo://target or hf://…")]
Draft = Annotated[str, typer.Option("--draft", help="Model folder, demo://draft or hf://…")]
NumDrafts = Annotated[int, typer.Option("--num-drafts", min=0, max=64, help="Draft processes.")]
Lookahead = Annotated[int, typer.Option("--lookahead", min=1, max=16, help="K: tokens proposed.")]
Branches = Annotated[int, typer.Option("--branches", min=1, max=128, help="N: outcomes prepared.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bfloat16 or float32.")]
ModeOption = Annotated[Mode, typer.Option("--mode", help="How rounds are run.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


@app.callback()
def common(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show stack traces.")] = False,
) -> None:
    """Take what all commands share."""
    global _debug  # noqa: PLW0603
    _debug = debug


@app.command("generate")
def generate_command(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    *,
    endpoint: Annotated[
        str | None, typer.Option(help="A running target; without one the command starts one.")
    ] = None,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    mode: ModeOption = Mode.AUTO,
    seed: Annotated[int | None, typer.Option(help="Of the noise; drawn if unset.")] = None,
    temperature: Annotated[float, typer.Option(help="0..2; 0 is greedy.")] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="New tokens at most.")] = 128,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    num_drafts: NumDrafts = 1,
    dtype: Dtype = "bfloat16",
    is_json: Json = False,
) -> None:
    """Continue a prompt."""
    call = GenerateCall(
        prompt=sys.stdin.read() if prompt == "-" else prompt,
        sampling=SamplingParams(temperature=temperature, stop=tuple(stop or ())),
        seed=seed,
        max_tokens=max_tokens,
        mode=mode,
    )
    options = GenerateOptions(
        endpoint=endpoint,
        deployment=Deployment(
            target=target,
            draft=draft,
            num_drafts=0 if mode is Mode.AUTOREGRESSIVE else num_drafts,
            common_flags=_common_flags(lookahead, branches, dtype),
        ),
        is_quiet=is_json or not err.is_terminal,
    )
    show = (lambda _text: None) if is_json else (lambda text: out.print(text, end="", markup=False))
    result = _run(generate(options, call, show))
    if is_json:
        out.print(json.dumps(result.as_json(), ensure_ascii=False), markup=False)
        return
    out.print()
    err.print(summary([("", result.figures)]))


@app.command("up")
def up_command(
    *,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    num_drafts: NumDrafts = 1,
    mode: ModeOption = Mode.AUTO,
    lookahead: Lookahead = 6,
    branches: Branches = 24,
    dtype: Dtype = "bfloat16",
    port: Annotated[
        int, typer.Option(min=0, max=65000, help="Target's gRPC port, drafts follow; 0: any.")
    ] = 50051,
    http_port: Annotated[
        int, typer.Option("--http-port", min=0, max=65000, help="Target's HTTP port; 0: any.")
    ] = 9090,
    is_json: Json = False,
) -> None:
    """Run a target and its drafts on this machine until Ctrl-C."""
    deployment = Deployment(
        target=target,
        draft=draft,
        num_drafts=0 if mode is Mode.AUTOREGRESSIVE else num_drafts,
        port=port,
        http_port=http_port,
        common_flags=_common_flags(lookahead, branches, dtype),
    )
    _run(up(deployment, is_json=is_json))


@app.command("demo")
def demo_command(
    *,
    target: Target = "demo://target",
    draft: Draft = "demo://draft",
    temperature: Annotated[float, typer.Option(help="0..2; 0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 7,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="New tokens.")] = 200,
    lookahead: Lookahead = 6,
    branches: Branches = 24,
) -> None:
    """Write one text twice, plain and speculative, and compare."""
    deployment = Deployment(
        target=target,
        draft=draft,
        common_flags=_common_flags(lookahead, branches, "bfloat16"),
    )
    options = DemoOptions(temperature=temperature, seed=seed, max_tokens=max_tokens)
    _run(demo(deployment, options))


@app.command("models")
def models_command(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders to look in.", exists=True, file_okay=False),
    ] = None,
    *,
    is_json: Json = False,
) -> None:
    """List the embedded pair and the models in folders."""
    models = local_models(folders or [])
    if is_json:
        out.print(json.dumps([asdict(model) for model in models]))
    else:
        out.print(models_table(models))


@app.command("version")
def version_command() -> None:
    """Print the version."""
    out.print(ssd.__version__)


def _common_flags(lookahead: int, branches: int, dtype: str) -> tuple[str, ...]:
    return ("--lookahead", str(lookahead), "--branches", str(branches), "--dtype", dtype)


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a command's work; an error of ours becomes one line and an exit code."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except SSDError as error:
        if _debug:
            raise
        err.print("[red]error:[/red] ", end="")
        err.print(str(error), markup=False)
        raise typer.Exit(2 if isinstance(error, RequestError | SettingsError) else 1) from None

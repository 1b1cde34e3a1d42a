"""``python -m ssd_bench.gpu_check``, ``make gpu-check``: run the checks, print and write them.

Exit code: 0 if no check failed or timed out, also if a speed target is missed; else 1; 2 if the
checks cannot run here, 130 after Ctrl-C.
The results are written after each check, so those of a run that was ended are there too.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

# Standard library only: packages of other modules can be missing.
from ssd_bench.gpu_check.checks import CHECKS

LIMIT_SECONDS = 1500.0
REQUIRED = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "huggingface_hub": "huggingface_hub",
    "numpy": "numpy",
    "jinja2": "jinja2",
    "yaml": "pyyaml",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "google.rpc": "googleapis-common-protos",
    "google.protobuf": "protobuf",
    "prometheus_client": "prometheus-client",
    "opentelemetry.trace": "opentelemetry-api",
    "llguidance": "llguidance",
    "typer": "typer",
    "rich": "rich",
}
"""Packages by the module that they provide. The first two are expected on a GPU machine, and bring
the next five with them."""
NO_GPU = (
    "torch finds no GPU: gpu-check needs an NVIDIA GPU (36 GB of memory for all checks), its "
    "driver and a torch with CUDA; --on cpu runs the same checks with small models"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    try:
        options = _parser(list(CHECKS)).parse_args(argv)
    except _UsageError as error:
        return _cannot_run(f"{error} (see: make gpu-check GPU_CHECK_ARGS=--help)")
    missing = missing_packages()
    if options.missing:
        sys.stdout.write(" ".join(missing) + "\n")
        return 0
    # Nothing below may be imported before this: its packages can be missing.
    if missing:
        return _cannot_run(
            f"missing packages: {' '.join(missing)}; on a machine with a network, run "
            "'pip download --only-binary :all: -d wheels " + " ".join(missing) + "' with the same "
            "Python, copy the folder here, and run 'make gpu-check WHEELS=wheels'"
        )
    problem = _problem(options)
    return _cannot_run(problem) if problem else _run(options)


def missing_packages(required: Mapping[str, str] = REQUIRED) -> list[str]:
    """Return the names of the packages whose modules are not installed."""
    return [package for module, package in required.items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class _UsageError(Exception):
    """The command line is wrong."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(message)


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="make gpu-check",
        usage='%(prog)s [WHEELS=FOLDER] [GPU_CHECK_ARGS="..."]',
        description="Check and measure this GPU machine.",
        allow_abbrev=False,
    )
    parser.add_argument("--missing", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda", help="device")
    parser.add_argument(
        "--only", nargs="+", choices=names, metavar="CHECK", default=list(names), help="checks"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_check.json"), help="file for the results"
    )
    parser.add_argument(
        "--scratch", type=Path, help="existing folder for random weights (up to 40 GB)"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, help="seconds for all checks together"
    )
    return parser


def _problem(options: argparse.Namespace) -> str:
    """Return why the checks cannot run with these options; empty if they can."""
    if options.scratch is not None and not options.scratch.is_dir():
        return f"--scratch {options.scratch}: there is no such folder"
    if not os.access(options.output.absolute().parent, os.W_OK):
        return f"--output {options.output}: its folder cannot be written"
    return NO_GPU if options.on == "cuda" and not _has_gpu() else ""


def _cannot_run(reason: str) -> int:
    sys.stderr.write(f"error: {reason}\n")
    return 2


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415

    return torch.cuda.is_available()


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415

    from ssd_bench.gpu_check.outcome import Environment, Outcome  # noqa: PLC0415
    from ssd_bench.gpu_check.report import as_json, lines, table, target_table  # noqa: PLC0415
    from ssd_bench.gpu_check.supervisor import run_checks  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=True)
    outcomes: dict[str, Outcome] = {}
    seconds: dict[str, float] = {}

    def write() -> None:
        is_complete = len(outcomes) == len(options.only)
        document = as_json(outcomes, seconds, options.on, is_complete=is_complete)
        # A run that is killed leaves the old file or the new one.
        unfinished = options.output.with_name(options.output.name + ".tmp")
        unfinished.write_text(json.dumps(document, indent=2) + "\n")
        unfinished.replace(options.output)

    def show(name: str, outcome: Outcome, duration: float) -> None:
        outcomes[name], seconds[name] = outcome, duration
        for line in lines(name, outcome, duration):
            console.print(line, markup=False)
        write()

    # A SIGTERM too ends the processes of the check that runs.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    code = 0
    try:
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            environment = Environment(device=options.on, scratch=Path(folder))
            run_checks(options.only, environment, options.limit, show)
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(outcomes)} of {len(options.only)} checks")
        code = 130
    write()
    console.print(table(outcomes, seconds))
    console.print()
    console.print(target_table(outcomes, options.on))
    console.print(f"written: {options.output}")
    return code or int(
        any(outcome.status in {"failed", "timed out"} for outcome in outcomes.values())
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

"""``python -m ssd_bench.gpu_check``, ``make gpu-check``: run the checks, print and write them.

Exit code: 0 if no check failed, 1 if one did, 2 if the checks cannot run here.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

LIMIT_SECONDS = 480.0
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
    "grpc_status": "grpcio-status",
    "google.protobuf": "protobuf",
    "prometheus_client": "prometheus-client",
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
    missing = missing_packages()
    if list(argv or sys.argv[1:]) == ["--missing"]:
        sys.stdout.write(" ".join(missing) + "\n")
        return 0
    # Nothing below may be imported before this: its packages can be missing.
    if missing:
        return _cannot_run(
            f"missing packages: {' '.join(missing)}; on a machine with a network, run "
            "'pip download --only-binary :all: -d wheels " + " ".join(missing) + "' with the same "
            "Python, copy the folder here, and run 'make gpu-check WHEELS=wheels'"
        )
    from ssd_bench.gpu_check.checks import CHECKS  # noqa: PLC0415

    options = _parser(list(CHECKS)).parse_args(argv)
    if options.scratch is not None and not options.scratch.is_dir():
        return _cannot_run(f"--scratch {options.scratch}: there is no such folder")
    if not os.access(options.output.absolute().parent, os.W_OK):
        return _cannot_run(f"--output {options.output}: its folder cannot be written")
    if options.on == "cuda" and not _has_gpu():
        return _cannot_run(NO_GPU)
    return _run(options)


def missing_packages(required: Mapping[str, str] = REQUIRED) -> list[str]:
    """Return the names of the packages whose modules are not installed."""
    return [package for module, package in required.items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make gpu-check", description="Check this GPU machine.")
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


def _cannot_run(reason: str) -> int:
    sys.stderr.write(f"error: {reason}\n")
    return 2


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415

    return torch.cuda.is_available()


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console  # noqa: PLC0415

    from ssd_bench.gpu_check.outcome import Environment, Outcome  # noqa: PLC0415
    from ssd_bench.gpu_check.report import as_json, lines, table  # noqa: PLC0415
    from ssd_bench.gpu_check.supervisor import run_checks  # noqa: PLC0415

    console = Console(highlight=False, soft_wrap=True)
    seconds: dict[str, float] = {}

    def show(name: str, outcome: Outcome, duration: float) -> None:
        seconds[name] = duration
        for line in lines(name, outcome, duration):
            console.print(line, markup=False)

    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        environment = Environment(device=options.on, scratch=Path(folder))
        outcomes = run_checks(options.only, environment, options.limit, show)
    console.print(table(outcomes, seconds))
    options.output.write_text(json.dumps(as_json(outcomes, seconds, options.on), indent=2) + "\n")
    console.print(f"written: {options.output}")
    return int(any(outcome.status == "failed" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())

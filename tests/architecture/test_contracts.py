import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STAND_INS = {
    "operator/ssd_operator/observe/cluster.py:Cluster": (
        "tests/unit/ssd_operator/memory_cluster.py:MemoryCluster"
    ),
    "operator/ssd_operator/runtime/engines.py:Engines": (
        "tests/unit/ssd_operator/world.py:MemoryEngines"
    ),
    "operator/ssd_operator/runtime/readiness.py:Lists": (
        "tests/unit/ssd_operator/runtime/test_readiness.py:Answers"
    ),
    "services/ssd/ports.py:Clock": "services/ssd/testing/clock.py:FakeClock",
    "services/ssd/ports.py:TokenSink": "services/ssd/testing/sink.py:ListSink",
    "services/ssd/ports.py:ByteStream": "services/ssd/testing/stream.py:MemoryStream",
    "services/ssd/ports.py:Tokenizer": "services/ssd/testing/tokenizer.py:ByteTokenizer",
    "services/ssd/transport/frame.py:TensorChannel": (
        "services/ssd/transport/inprocess.py:InProcessChannel"
    ),
    "services/ssd/speculation/fan_out.py:FanOutPolicy": (
        "services/ssd/speculation/fan_out.py:Split"
    ),
    "services/ssd/engine/attention/backend.py:AttentionBackend": (
        "services/ssd/engine/attention/reference.py:ReferenceAttention"
    ),
    "services/ssd/engine/models/decoder.py:Attends": (
        "services/ssd/engine/attention/context.py:AttentionPass"
    ),
    "services/ssd/engine/models/registry.py:CausalModel": (
        "services/ssd/testing/tiny_model.py:TinyModel"
    ),
    "services/ssd_target/decoding/ports.py:Runner": (
        "services/ssd/testing/ledger_runner.py:LedgerRunner"
    ),
    "services/ssd_target/decoding/ports.py:Drafts": "services/ssd_target/drafts/pool.py:DraftPool",
    "services/ssd_target/decoding/ports.py:Flusher": (
        "tests/unit/ssd_target/conftest.py:NoWakeups"
    ),
    "services/ssd_target/decoding/sequence.py:StopDetector": (
        "tests/unit/ssd_target/decoding/test_sequence.py:StopsAt"
    ),
    "services/ssd_draft/tree.py:TreeRunner": "services/ssd/testing/ledger_tree.py:LedgerTreeRunner",
    "services/ssd_draft/sessions.py:LinkEnd": "tests/unit/ssd_draft/test_worker.py:FakeLink",
}
"""Each Protocol and what takes its place in tests: a shipped fake, a test's own, or the plainest
real thing where that runs in memory."""
BANNED_WORDS = {
    "dbt",
    "gamma",
    "glue",
    "helper",
    "jit",
    "lossless",
    "manager",
    "rec",
    "speculator",
    "tmp",
    "util",
    "utils",
    "verifier",
}
"""Words that mean nothing here, or mean two things."""


def classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def members(node: ast.ClassDef) -> set[str]:
    """Methods, properties, fields, and attributes that methods give to self."""
    found: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(each.name)
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found.add(each.target.id)
        elif isinstance(each, ast.Assign):
            found |= {target.id for target in each.targets if isinstance(target, ast.Name)}
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            found.add(each.attr)
    return found


def find(root: Path, address: str) -> ast.ClassDef:
    path, _, name = address.partition(":")
    return classes(root / path)[name]


def protocols(root: Path, files: list[Path]) -> Iterator[str]:
    """Seams; a private Protocol only types what another library leaves untyped."""
    for path in files:
        if path.parts[0] != "tests":
            for name, node in classes(root / path).items():
                if not name.startswith("_") and any(
                    ast.unparse(base).startswith("Protocol") for base in node.bases
                ):
                    yield f"{path.as_posix()}:{name}"


def test_every_protocol_has_its_stand_in(root: Path, handwritten: list[Path]) -> None:
    assert set(protocols(root, handwritten)) == set(STAND_INS)


@pytest.mark.parametrize(("protocol", "stand_in"), STAND_INS.items())
def test_a_stand_in_has_all_members_of_its_protocol(
    root: Path, protocol: str, stand_in: str
) -> None:
    assert members(find(root, protocol)) - members(find(root, stand_in)) == set()


def test_import_contracts_hold(root: Path) -> None:
    # In this process it would reconfigure logging under the feet of other tests.
    command = [
        "import sys; sys.path.insert(0, 'services')",
        "from importlinter.cli import lint_imports_command; lint_imports_command()",
    ]
    checked = subprocess.run(
        [sys.executable, "-c", "; ".join(command)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout


def test_generated_code_is_what_the_protos_say(root: Path, tmp_path: Path) -> None:
    names = sorted(path.relative_to(root / "protos") for path in root.glob("protos/ssd/v1/*.proto"))
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos"]
        + [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
        + [f"protos/{name.as_posix()}" for name in names],
        cwd=root,
        check=True,
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "ssd" / "v1").iterdir()}
    committed = {
        path.name: path.read_text()
        for path in (root / "services" / "ssd" / "v1").glob("*.py*")
        if path.name != "__init__.py"
    }
    assert sorted(fresh) == sorted(committed)
    assert [name for name in fresh if fresh[name] != committed[name]] == []


def test_the_protos_explain_every_field(root: Path) -> None:
    for path in root.glob("protos/ssd/v1/*.proto"):
        lines = path.read_text().splitlines()
        for index, line in enumerate(lines):
            if re.match(r"\s+(optional |repeated )?[\w.]+(<.*>)? \w+ = \d+;", line):
                before = lines[index - 1].strip()
                assert "//" in line or before.startswith("//"), f"{path.name}:{index + 1}"


def names_of(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.arg():
            yield node.arg
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.attr


def words_of(name: str) -> set[str]:
    return set(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_"))


def test_names_use_the_words_of_the_house(root: Path, handwritten: list[Path]) -> None:
    strange = [
        f"{path}:{name}"
        for path in handwritten
        if path.parts[0] != "tests"
        for node in ast.walk(ast.parse((root / path).read_text()))
        for name in names_of(node)
        if words_of(name) & BANNED_WORDS
    ]
    assert strange == []


def test_a_fake_is_shipped_for_tests_alone(project: dict[str, Any]) -> None:
    contracts = project["tool"]["importlinter"]["contracts"]
    (fakes,) = [each for each in contracts if each.get("protected_modules") == ["ssd.testing"]]
    assert fakes["allowed_importers"] == []


def test_tests_never_sleep_in_real_time_to_wait(root: Path, handwritten: list[Path]) -> None:
    for path in handwritten:
        if path.parts[:2] == ("tests", "unit"):
            slept = re.findall(r"\bsleep\((?!0\))", (root / path).read_text())
            assert slept == [], f"{path}: wait for an event, or move a FakeClock"

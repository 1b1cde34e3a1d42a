"""``python -m ssd.fetch`` with a local hub, as in the init container of a pod."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.hub import COMMIT, NAME, TOKEN, WAIT_SECONDS, Hub, serving
from tests.processes import PYTHON

from ssd.testing.tiny_folder import write_tiny_folder

NO_COMMIT = "f" * 40


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_tiny_folder(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    made = Hub(files | {"pytorch_model.bin": b"not wanted"})
    made.may_send.set()
    with serving(made) as served:
        yield served


@dataclass
class Pod:
    """The cache, which pods can share, and the settings of a container."""

    hub: Hub
    folder: Path
    cache: Path
    token: str = ""

    @property
    def termination_message(self) -> str:
        """The termination message."""
        return (self.folder / "termination-log").read_text()

    def start(self, *command: str, **more: str) -> "subprocess.Popen[str]":
        self.folder.mkdir(exist_ok=True)
        variables = {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.cache),
            **({"HF_TOKEN": self.token} if self.token else {}),
            **more,
        }
        settings = [f"{name}={value}" for name, value in variables.items()]
        return subprocess.Popen(
            ["env", *settings, *PYTHON, *command], stderr=subprocess.PIPE, text=True
        )

    def start_fetch(self, model: str = f"hf://{NAME}@{COMMIT}") -> "subprocess.Popen[str]":
        log = str(self.folder / "termination-log")
        return self.start("-m", "ssd.fetch", "--model", model, "--termination-log", log)

    def fetch(self, model: str = f"hf://{NAME}@{COMMIT}") -> tuple[int, list[dict[str, Any]]]:
        return ended(self.start_fetch(model))


def ended(process: "subprocess.Popen[str]") -> tuple[int, list[dict[str, Any]]]:
    """Return exit code and log of a process."""
    _, output = process.communicate(timeout=WAIT_SECONDS)
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return process.returncode, [json.loads(line) for line in lines]


def next_event(process: "subprocess.Popen[str]", event: str) -> dict[str, Any]:
    """Return the next event of this name."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("{") and (found := json.loads(line))["event"] == event:
            return dict(found)
    raise AssertionError(f"no {event}")


@pytest.fixture
def pod(hub: Hub, tmp_path: Path) -> Pod:
    return Pod(hub, tmp_path / "pod", tmp_path / "cache")


def test_an_engine_without_hub_and_token_loads_a_fetched_model(pod: Pod) -> None:
    pod.hub.is_gated, pod.token = True, TOKEN
    code, events = pod.fetch()
    assert code == 0, events
    assert (events[-1]["event"], events[-1]["was_here"]) == ("fetched", False)
    (fetching,) = [event for event in events if event["event"] == "fetching"]
    assert fetching["missing_bytes"] == fetching["bytes"] > 1000
    pod.hub.is_down, pod.token = True, ""
    find = (
        "import sys; from ssd.model_files.model_source import resolve; "
        f"print(resolve('hf://{NAME}@{COMMIT}'), file=sys.stderr)"
    )
    process = pod.start("-c", find, HF_HUB_OFFLINE="1")
    _, output = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, output
    folder = Path(output.strip().splitlines()[-1])
    assert folder.is_relative_to(pod.cache)
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() == pod.hub.files[weights]
    assert not (folder / "pytorch_model.bin").exists()


def test_a_model_that_was_deleted_is_fetched_again_and_a_complete_one_is_not(pod: Pod) -> None:
    assert pod.fetch()[0] == 0
    shutil.rmtree(pod.cache / "hub" / f"models--{NAME.replace('/', '--')}")
    code, events = pod.fetch()
    assert (code, events[-1]["was_here"]) == (0, False)
    pod.hub.is_down = True
    code, events = pod.fetch()
    assert (code, events[-1]["was_here"]) == (0, True)
    assert len(pod.hub.paths) == 2


def test_two_pods_with_one_cache_fetch_once(pod: Pod, tmp_path: Path) -> None:
    pod.hub.may_send.clear()
    first = pod.start_fetch()
    try:
        assert pod.hub.weights_requested.wait(WAIT_SECONDS)
        second = Pod(pod.hub, tmp_path / "other", pod.cache).start_fetch()
        try:
            assert next_event(second, "waits")["model"] == NAME
            pod.hub.may_send.set()
            assert ended(first)[0] == 0
            code, events = ended(second)
            assert (code, events[-1]["was_here"]) == (0, True)
        finally:
            second.kill()
    finally:
        first.kill()
    assert len(pod.hub.paths) == 1


def test_an_interrupted_download_fails_and_is_repeated(pod: Pod) -> None:
    pod.hub.may_send.clear()
    process = pod.start_fetch()
    try:
        assert pod.hub.weights_requested.wait(WAIT_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 143
    finally:
        process.kill()
    pod.hub.may_send.set()
    assert pod.fetch()[0] == 0


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (f"hf://{NAME}@{NO_COMMIT}", "not this revision"),
        (f"hf://org/none@{COMMIT}", "no such model"),
        (f"hf://{NAME}@main", "is not hf://org/name@commit"),
    ],
)
def test_a_missing_model_writes_one_line_to_the_termination_message(
    pod: Pod, model: str, message: str
) -> None:
    assert pod.fetch(model)[0] == os.EX_CONFIG
    assert message in pod.termination_message
    assert model in pod.termination_message
    assert "\n" not in pod.termination_message


def test_a_gated_model_requires_a_token(pod: Pod) -> None:
    pod.hub.is_gated, pod.token = True, "hf_of_a_stranger"
    assert pod.fetch()[0] == os.EX_CONFIG
    assert "accepted its terms" in pod.termination_message
    assert "token" in pod.termination_message
    assert pod.token not in pod.termination_message

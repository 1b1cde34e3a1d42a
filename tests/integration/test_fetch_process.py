"""``python -m ssd.fetch`` against a hub of this machine: what pods do before engines start."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import ssd
from ssd.testing.tiny_folder import write_tiny_folder

pytestmark = pytest.mark.timeout(90)
SERVICES = Path(ssd.__file__).parent.parent
COMMIT, NO_COMMIT = "0123456789abcdef" * 2 + "01234567", "f" * 40
NAME = "org/tiny"
TOKEN = "hf_of_a_friend"
PATIENCE_SECONDS = 60.0


@dataclass
class Hub:
    """The few pages of the hub that a download asks for."""

    files: dict[str, bytes]
    is_gated: bool = False
    is_down: bool = False
    may_send: threading.Event = field(default_factory=threading.Event)
    """Whether weights may go out."""
    is_asked_for_weights: threading.Event = field(default_factory=threading.Event)
    paths: list[str] = field(default_factory=list)
    """Weights that were sent."""
    url: str = ""

    def page(self, path: str, token: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if self.is_down:
            return 503, {}, b"{}"
        if not path.startswith((f"/api/models/{NAME}/", f"/{NAME}/")):
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if COMMIT not in path:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if self.is_gated and token != f"Bearer {TOKEN}":
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if path.startswith("/api"):
            return 200, {"Content-Type": "application/json"}, self._listing("/tree/" in path)
        name = path.rpartition("/")[2]
        body = self.files[name]
        about = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return 200, about, body

    def _listing(self, is_tree: bool) -> bytes:  # noqa: FBT001
        entries = [self._entry(name, body) for name, body in self.files.items()]
        info = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
        return json.dumps(entries if is_tree else info).encode()

    def _entry(self, name: str, body: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(body).hexdigest()
        return {"type": "file", "path": name, "size": len(body), "oid": digest}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Page(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, headers, body = hub.page(path, self.headers.get("Authorization", ""))
            is_weights = path.endswith(".safetensors") and status == 200
            if is_weights and self.command == "GET":
                hub.is_asked_for_weights.set()
                hub.may_send.wait(PATIENCE_SECONDS)
                hub.paths.append(path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        yield hub
        hub.may_send.set()
        server.shutdown()


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
    """What a pod gives its containers: a cache that it may share, and settings."""

    hub: Hub
    folder: Path
    cache: Path
    token: str = ""

    @property
    def last_words(self) -> str:
        """What the kubelet reads."""
        return (self.folder / "termination-log").read_text()

    def start(self, *command: str, **more: str) -> "subprocess.Popen[str]":
        self.folder.mkdir(exist_ok=True)
        variables = {
            "HF_ENDPOINT": self.hub.url,
            "HF_HOME": str(self.cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONPATH": str(SERVICES),
            **({"HF_TOKEN": self.token} if self.token else {}),
            **more,
        }
        settings = [f"{name}={value}" for name, value in variables.items()]
        return subprocess.Popen(
            ["env", *settings, sys.executable, *command], stderr=subprocess.PIPE, text=True
        )

    def start_fetch(self, model: str = f"hf://{NAME}@{COMMIT}") -> "subprocess.Popen[str]":
        log = str(self.folder / "termination-log")
        return self.start("-m", "ssd.fetch", "--model", model, "--termination-log", log)

    def fetch(self, model: str = f"hf://{NAME}@{COMMIT}") -> tuple[int, list[dict[str, Any]]]:
        return ended(self.start_fetch(model))


def ended(process: "subprocess.Popen[str]") -> tuple[int, list[dict[str, Any]]]:
    """Exit code and log of a process."""
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    lines = [line for line in said.splitlines() if line.startswith("{")]
    return process.returncode, [json.loads(line) for line in lines]


def heard(process: "subprocess.Popen[str]", event: str) -> dict[str, Any]:
    """The next event of that name."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("{") and (found := json.loads(line))["event"] == event:
            return dict(found)
    raise AssertionError(f"no {event}")


@pytest.fixture
def pod(hub: Hub, tmp_path: Path) -> Pod:
    return Pod(hub, tmp_path / "pod", tmp_path / "cache")


def test_what_was_fetched_is_found_by_an_engine_without_hub_and_token(pod: Pod) -> None:
    pod.hub.is_gated, pod.token = True, TOKEN
    code, events = pod.fetch()
    assert code == 0, events
    assert (events[-1]["event"], events[-1]["was_here"]) == ("fetched", False)
    (fetching,) = [event for event in events if event["event"] == "fetching"]
    assert fetching["missing_bytes"] == fetching["bytes"] > 1000
    pod.hub.is_down, pod.token = True, ""
    find = (
        "import sys; from ssd.model_source import resolve; "
        f"print(resolve('hf://{NAME}@{COMMIT}'), file=sys.stderr)"
    )
    process = pod.start("-c", find, HF_HUB_OFFLINE="1")
    _, said = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, said
    folder = Path(said.strip().splitlines()[-1])
    assert folder.is_relative_to(pod.cache)
    weights = "model.safetensors"
    assert (folder / weights).read_bytes() == pod.hub.files[weights]
    assert not (folder / "pytorch_model.bin").exists()


def test_a_filled_cache_asks_no_hub(pod: Pod) -> None:
    assert pod.fetch()[0] == 0
    pod.hub.is_down = True
    code, events = pod.fetch()
    assert (code, events[-1]["was_here"]) == (0, True)
    assert len(pod.hub.paths) == 1


def test_two_pods_of_one_cache_fetch_once(pod: Pod, tmp_path: Path) -> None:
    pod.hub.may_send.clear()
    first = pod.start_fetch()
    try:
        assert pod.hub.is_asked_for_weights.wait(PATIENCE_SECONDS)
        second = Pod(pod.hub, tmp_path / "other", pod.cache).start_fetch()
        try:
            assert heard(second, "waits")["model"] == NAME
            pod.hub.may_send.set()
            assert ended(first)[0] == 0
            code, events = ended(second)
            assert (code, events[-1]["was_here"]) == (0, True)
        finally:
            second.kill()
    finally:
        first.kill()
    assert len(pod.hub.paths) == 1


def test_a_download_that_is_called_off_is_no_success_and_is_done_again(pod: Pod) -> None:
    pod.hub.may_send.clear()
    process = pod.start_fetch()
    try:
        assert pod.hub.is_asked_for_weights.wait(PATIENCE_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 143
    finally:
        process.kill()
    pod.hub.may_send.set()
    assert pod.fetch()[0] == 0


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (f"hf://{NAME}@{NO_COMMIT}", "not this revision"),
        (f"hf://org/none@{COMMIT}", "no such model"),
        (f"hf://{NAME}@main", "is not hf://org/name@commit"),
        ("demo://target", "is not hf://org/name@commit"),
    ],
)
def test_what_the_hub_does_not_have_is_one_sentence_for_the_kubelet(
    pod: Pod, model: str, words: str
) -> None:
    assert pod.fetch(model)[0] == os.EX_CONFIG
    assert words in pod.last_words
    assert model in pod.last_words
    assert "\n" not in pod.last_words


@pytest.mark.parametrize("token", ["", "hf_of_a_stranger"])
def test_a_model_that_is_not_for_everybody_asks_for_a_token(pod: Pod, token: str) -> None:
    pod.hub.is_gated, pod.token = True, token
    assert pod.fetch()[0] == os.EX_CONFIG
    assert "accepted its terms" in pod.last_words
    assert "token" in pod.last_words
    assert token not in pod.last_words.split()

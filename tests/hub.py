"""A hub with one small model, for a test of this machine or, as a program, for a pod.

It imports only the standard library, because a pod has only this file.
"""

import hashlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef" * 2 + "01234567"
NAME = "org/tiny"
TOKEN = "hf_of_a_friend"
WAIT_SECONDS = 60.0


@dataclass
class Hub:
    """The pages of the hub that a download requests."""

    files: dict[str, bytes]
    is_gated: bool = False
    is_down: bool = False
    may_send: threading.Event = field(default_factory=threading.Event)
    """Weights are sent after this is set."""
    weights_requested: threading.Event = field(default_factory=threading.Event)
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
def serving(hub: Hub, host: str = "127.0.0.1", port: int = 0) -> Iterator[Hub]:
    """Serve during the block. With port 0 the system selects one; ``hub.url`` contains it."""

    class Page(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, headers, body = hub.page(path, self.headers.get("Authorization", ""))
            is_weights = path.endswith(".safetensors") and status == 200
            if is_weights and self.command == "GET":
                hub.weights_requested.set()
                hub.may_send.wait(WAIT_SECONDS)
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

    with ThreadingHTTPServer((host, port), Page) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        hub.url = f"http://{host}:{server.server_port}"
        yield hub
        hub.may_send.set()
        server.shutdown()


if __name__ == "__main__":
    _folder, _port = sys.argv[1:]
    _files = {each.name: each.read_bytes() for each in Path(_folder).iterdir() if each.is_file()}
    _hub = Hub(_files, is_gated=True)
    _hub.may_send.set()
    with serving(_hub, "0.0.0.0", int(_port)):
        signal.sigwait({signal.SIGTERM})

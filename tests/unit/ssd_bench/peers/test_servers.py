"""Servers over HTTP: what they accept is found out, and their texts are compared with ours."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ssd.errors import SetupError
from ssd_bench.__main__ import main
from ssd_bench.peers.contenders import Contender, server
from ssd_bench.peers.measure import Row
from ssd_bench.peers.report import markdown
from ssd_bench.peers.servers import ServerEngine
from ssd_bench.peers.workers.wire import Batch

Reply = Callable[[str, Any], tuple[int, Any]]
BATCH: Batch = {"prompts": [[7, 8], [9, 10]], "max_tokens": 2, "temperature": 0.0, "seed": 3}
MODELS = {"data": [{"id": "small"}]}


@pytest.fixture
def start() -> Iterator[Callable[[Reply], str]]:
    """Starts a server that answers a path and a body with a status and a value."""
    servers = []

    def started(reply: Reply) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: Any) -> None:
                status, value = reply(self.path, body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(value).encode())

            def log_message(self, *arguments: object) -> None:
                """Write nothing."""

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield started
    for each in servers:
        each.shutdown()
        each.server_close()


def completions(texts: list[dict[str, Any]], num_tokens: int) -> dict[str, Any]:
    choices = [{"index": index, **each} for index, each in enumerate(texts)]
    return {"choices": choices[::-1], "usage": {"completion_tokens": num_tokens}}


def sglang(path: str, body: Any) -> tuple[int, Any]:
    if path != "/generate":
        return 404, {}
    assert body["sampling_params"]["ignore_eos"]
    count = body["sampling_params"]["max_new_tokens"]
    return 200, [
        {"text": "x", "output_ids": ids[:1] * count, "meta_info": {"completion_tokens": count}}
        for ids in body["input_ids"]
    ]


def vllm(path: str, body: Any) -> tuple[int, Any]:
    if path == "/v1/models":
        return 200, MODELS
    if path != "/v1/completions":
        return 404, {}
    assert (body["model"], body["return_token_ids"]) == ("small", True)
    texts = [{"text": "x", "token_ids": ids[:1] * body["max_tokens"]} for ids in body["prompt"]]
    return 200, completions(texts, body["max_tokens"] * len(texts))


def text_only(path: str, body: Any) -> tuple[int, Any]:
    if path == "/v1/models":
        return 200, MODELS
    known = path == "/v1/completions" and not body.keys() & {"ignore_eos", "return_token_ids"}
    if not known or not all(isinstance(each, str) for each in body["prompt"]):
        return 400, {"error": "not this"}
    return 200, completions([{"text": f"{each}!"} for each in body["prompt"]], 3)


@pytest.mark.parametrize(
    ("reply", "name", "texts", "num_tokens"),
    [
        (sglang, "SGLang, prompts are ids", [[7, 7], [9, 9]], 4),
        (vllm, "OpenAI, prompts are ids", [[7, 7], [9, 9]], 4),
        (text_only, "OpenAI, prompts are text", ["[7, 8]!", "[9, 10]!"], 3),
    ],
)
async def test_a_server_is_asked_in_the_way_that_it_accepts(
    reply: Reply, name: str, texts: list[Any], num_tokens: int, start: Callable[[Reply], str]
) -> None:
    engine = ServerEngine(start(reply) + "/v1/", str)
    await engine.load()
    assert engine.version == name
    answer = await engine.complete(BATCH)
    assert (answer.texts, answer.num_tokens) == (texts, num_tokens)


@pytest.mark.parametrize(
    ("status", "value", "message"),
    [
        (404, {}, "takes no completion requests: status 404"),
        (200, {"data": []}, "takes no completion requests"),
        (503, {"error": "loading"}, "status 503: .*loading"),
    ],
)
async def test_a_server_that_cannot_be_measured_has_a_reason(
    status: int, value: Any, message: str, start: Callable[[Reply], str]
) -> None:
    with pytest.raises(SetupError, match=message):
        await ServerEngine(start(lambda _path, _body: (status, value)), str).load()


async def test_a_server_that_does_not_run_is_named() -> None:
    with pytest.raises(SetupError, match=r"127.0.0.1:9/generate: .*is the server running"):
        await ServerEngine("http://127.0.0.1:9", str).load()


def test_the_texts_of_a_server_are_compared_with_plain_decoding_of_this_product() -> None:
    def row(contender: Contender, *texts: list[int] | str) -> Row:
        found = [[each] for each in texts]
        return Row(contender, tokens_per_second=[10.0], other_cpus=[0.0], texts=found)

    plain = row(Contender(peer="ssd"), [1, 2], [3])
    ids = row(server("a"), [1, 2], [4])
    text = row(server("b"), "[1, 2]", "[4]")
    table = markdown([plain, ids, text], "", str).splitlines()
    assert table[-2] == "| demo | 1 | 0 | a | a server |  |  |  | 10 (10–10) |  | 1/2 |  |  |"
    assert table[-1] == "| demo | 1 | 0 | b | a server |  |  |  | 10 (10–10) |  | 1/2 |  |  |"


@pytest.mark.parametrize("names", ["other", "ssd=http://a", "a=localhost:1", "=http://a"])
def test_a_bad_name_or_url_is_a_usage_error(names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peers", "--peers", names]) == 2
    assert capsys.readouterr().err.startswith("error: --peers ")

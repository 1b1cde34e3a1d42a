"""The log of the gateway."""

import json
from pathlib import Path

import pytest
from tests.gateway import ScriptedTarget, fronting, get, keys_file

from ssd.observability.log import JsonFormatter


async def test_each_request_is_logged_at_its_end_with_its_id_and_its_client(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    caplog.handler.setFormatter(JsonFormatter("gateway"))
    keys = keys_file(tmp_path, alice="secret")
    async with (
        fronting(ScriptedTarget(), api_keys_file=keys) as front,
        front.client("secret") as client,
    ):
        await client.completions.create(
            model="demo", prompt="x", extra_headers={"x-request-id": "abc"}
        )
        await get(front, "/v1/nothing")
        await get(front, "/readyz")
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    first, second = (line for line in lines if line["event"] in ("request", "refused"))
    first.pop("ts"), second.pop("ts"), second.pop("request_id")
    head = {"level": "info", "process": "gateway"}
    assert first == head | {
        "event": "request",
        "request_id": "abc",
        "path": "/v1/completions",
        "status": 200,
        "client": "key alice",
    }
    assert second == head | {
        "event": "refused",
        "path": "other",
        "status": 401,
        "client": "127.0.0.1",
    }

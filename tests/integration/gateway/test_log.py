"""The log of the gateway."""

import json

import pytest
from tests.gateway import ScriptedTarget, fronting, get, spells

from ssd.observability.log import JsonFormatter


async def test_each_request_is_logged_at_its_end_with_its_id_and_its_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    caplog.handler.setFormatter(JsonFormatter("gateway"))
    async with fronting(ScriptedTarget(spells)) as front, front.client() as client:
        await client.completions.create(
            model="demo", prompt="x", extra_headers={"x-request-id": "abc"}
        )
        await get(front, "/v1/nothing")
        await get(front, "/readyz")
    lines = [json.loads(line) for line in caplog.text.splitlines()]
    found = [
        (line["request_id"], line["path"], line["status"], line["client"])
        for line in lines
        if line["event"] == "request"
    ]
    assert found[0] == ("abc", "/v1/completions", 200, "127.0.0.1")
    assert [each[1:3] for each in found[1:]] == [("other", 404)]

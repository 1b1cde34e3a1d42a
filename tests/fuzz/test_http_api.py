"""The HTTP API against its OpenAPI document: requests of all kinds from schemathesis."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
from tests.gateway import gateway_of
from tests.pairs import QUICK, target_of

from ssd.testing.tiny_folder import write_tiny_folder

# The document does not have the bounds of the model, so a request that it allows may be refused.
NOT_CHECKED = "positive_data_acceptance"
NUM_EXAMPLES = 100
LIMIT_SECONDS = 30
"""A request that takes longer hangs: texts are short."""


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_every_answer_is_one_of_the_document(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "model", seed=1)
    async with (
        target_of(folder, "--model-name", "tiny", *QUICK) as (target, _),
        gateway_of(target) as (gateway, _),
    ):
        document = json.loads((await gateway.probe("/openapi.json"))[1])
        for body in ("ChatRequest", "CompletionRequest"):
            fields = document["components"]["schemas"][body]["properties"]
            fields["model"] = {"enum": ["tiny"]}
            fields["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 8}
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(document))
        process = await asyncio.create_subprocess_exec(
            *(Path(sys.executable).with_name("schemathesis"), "run", file),
            *("--url", f"http://{gateway.http_address}", "--seed", "1"),
            *("--max-examples", str(NUM_EXAMPLES), "--checks", "all"),
            *("--exclude-checks", NOT_CHECKED, "--request-timeout", str(LIMIT_SECONDS)),
            *("--continue-on-failure", "--suppress-health-check", "all", "--no-color"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        shown, _ = await process.communicate()
        assert process.returncode == 0, shown.decode()[-20_000:]
        assert (await gateway.probe("/readyz"))[0] == 200

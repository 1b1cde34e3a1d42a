"""Without ``--deterministic``: one row per sequence in plain decoding, K+1 in verification.

Packed linears give a row the same bits in both, so the tokens are the same, in either dtype and
however the prompts of a batch come and go.
"""

import asyncio
import os

import pytest
from tests.exactness.conftest import Report
from tests.exactness.test_tokens import compare, complete_all, wait_for_drafts
from tests.packing import needs_packed_bfloat16

from ssd.cpu_plan import one_cpu_a_core
from ssd.launch import Deployment, deployed
from ssd.rpc.client import TargetClient
from ssd.types import Mode

pytestmark = pytest.mark.timeout(900)
LOOKAHEAD = 6
NUM_PROMPTS = 8


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=needs_packed_bfloat16)]
)
def test_plain_decoding_of_one_row_writes_the_tokens_of_verification(
    dtype: str, temperature: float, prompts: list[str], report: Report
) -> None:
    deployment = Deployment(
        # One thread each: a second one waits at each kernel while other tests run.
        allowed_cpus=one_cpu_a_core(os.sched_getaffinity(0))[:2],
        common_flags=("--dtype", dtype, "--max-model-len", "1024", "--lookahead", str(LOOKAHEAD)),
        target_flags=(
            *("--draft-deadline-ms", "10000", "--no-adaptive-deadline", "--no-circuit-breaker"),
        ),
    )

    some = prompts[::3][:NUM_PROMPTS]

    async def run() -> None:
        async with (
            deployed(deployment) as running,
            TargetClient(running.target.grpc_address) as client,
        ):
            await wait_for_drafts(client, 1)
            plain = await complete_all(client, some, temperature, Mode.AUTOREGRESSIVE)
            found = await complete_all(client, some, temperature, Mode.SPECULATIVE)
            tokens = [text.token_ids for text in plain]
            row = compare(report, f"fast, {dtype}", (LOOKAHEAD, temperature), tokens, found)
            assert row.hits > 0.5 * row.looked_up
            assert row.tokens_per_round > 2

    asyncio.run(run())

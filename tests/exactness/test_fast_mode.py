"""Without ``--deterministic``: one row per sequence in plain decoding, K+1 in verification.

Each engine proves at start that a row has the same bits in both cases, or runs one shape. So the
tokens are the same, whenever other prompts of a batch begin and end. ``test_sampling_parameters``
runs the same modes with the defaults of all settings in ``make test``.
"""

import pytest
from tests.exactness.cells import Report, Size, complete_all, pair
from tests.pairs import LONG_WAIT, QUICK

from ssd.engine.precision import has_bfloat16
from ssd.types import Mode

LEAST_ACCEPTED = 0.28
"""Lowest accepted share of the proposed tokens, as in ``test_tokens``."""


@pytest.mark.parametrize(
    ("engine", "dtype"),
    [
        pytest.param("openvino", "float32", marks=pytest.mark.slow),
        pytest.param("static", "float32", marks=pytest.mark.slow),
        pytest.param("torch", "float32", marks=pytest.mark.slow),
        pytest.param("torch", "bfloat16", marks=pytest.mark.slow),
        pytest.param(
            "openvino",
            "bfloat16",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not has_bfloat16(), reason="no bfloat16 arithmetic"),
            ],
        ),
    ],
)
async def test_plain_decoding_of_one_row_writes_the_tokens_of_verification(
    engine: str, dtype: str, report: Report
) -> None:
    # Texts are long against the rounds in which their sessions open.
    size = Size(lookahead=6, num_prompts=2, engine=engine, max_num_seqs=4, max_tokens=80)
    flags = ("--dtype", dtype)
    target_flags = (*LONG_WAIT, "--backup", "none", "--draft-model", "demo://draft", *flags)
    # The draft's engine matters for the start only, which takes OpenVINO seconds.
    draft_flags = ("--no-adaptive-branches", *flags, *QUICK)
    async with pair(size, target_flags=target_flags, draft_flags=draft_flags) as (client, _):
        plain = await complete_all(client, size, Mode.AUTOREGRESSIVE, (0.0, 1.0))
        found = await complete_all(client, size, Mode.SPECULATIVE, (0.0, 1.0))
        synchronous = await complete_all(client, size, Mode.SYNCHRONOUS, (0.0, 1.0))
    rows = report.compare(f"fast, {engine}, {dtype}", size, plain, found)
    assert sum(row.hits for row in rows) > 0.5 * sum(row.looked_up for row in rows)
    # Measured: .37 to .42. The tokens per round depend on the round in which a session opens, and
    # that on the machine; those of the draft in the target's process do not.
    num_proposed = sum(row.num_proposed for row in rows)
    assert sum(row.num_rejected for row in rows) < (1 - LEAST_ACCEPTED) * num_proposed
    for row in report.compare(f"fast, synchronous, {engine}, {dtype}", size, plain, synchronous):
        assert row.looked_up == 0
        assert row.tokens_per_round > 2

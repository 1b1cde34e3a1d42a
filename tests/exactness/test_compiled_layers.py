"""With compiled layers, speculation changes no token. ``make exactness``."""

import pytest
from tests.exactness.cells import Report, Size, Texts, complete_all, pair, plain_texts

from ssd.types import Mode

# A draft compiles more shapes than torch allows by default.
SIZE = Size(4, 3, engine="static", max_num_seqs=9, max_tokens=24, flags=("--compile-layers",))
WAITS_FOR_TABLES = ("--draft-deadline-ms", "10000", "--no-adaptive-deadline")


@pytest.fixture
def plain() -> Texts:
    return plain_texts(SIZE)


@pytest.mark.slow
async def test_speculation_with_compiled_layers_changes_no_token(
    plain: Texts, report: Report
) -> None:
    flags = ("--deterministic", *WAITS_FOR_TABLES)
    async with pair(SIZE, target_flags=flags) as (client, _):
        found = await complete_all(client, SIZE, Mode.SPECULATIVE)
    rows = report.compare("compiled layers", SIZE, plain, found)
    assert sum(row.hits for row in rows) > 0

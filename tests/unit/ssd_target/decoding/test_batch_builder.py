"""The width of a batch follows its proposals."""

import pytest
from tests.sequences import make_sequence

from ssd.engine.config import EngineConfig
from ssd.types import TokenId
from ssd_target.decoding.batch_builder import BatchBuilder

K = 3


@pytest.mark.parametrize(
    ("verify_columns", "proposals", "width"),
    [((1, K + 1), ((), ()), 1), ((1, K + 1), ((), (8,)), K + 1), ((K + 1,), ((), ()), K + 1)],
)
def test_only_a_round_with_proposals_has_more_than_one_column(
    verify_columns: tuple[int, ...], proposals: tuple[tuple[TokenId, ...], ...], width: int
) -> None:
    engine = EngineConfig(max_model_len=64, max_num_seqs=2, num_columns=K + 1)
    builder = BatchBuilder(engine, verify_columns)
    rows = [make_sequence((5, 6, 7), slot=slot) for slot in (0, 1)]
    for row in rows:
        builder.set_blocks(row.slot, [row.slot + 1])
    batch = builder.round(rows, proposals)
    expected = [[7, *proposal, *[0] * K][:width] for proposal in proposals]
    assert batch.tokens_BP.tolist() == expected
    assert batch.num_columns_B.tolist() == [1 + len(each) for each in proposals]
    assert batch.block_tables_BJ[:, 0].tolist() == [1, 2]

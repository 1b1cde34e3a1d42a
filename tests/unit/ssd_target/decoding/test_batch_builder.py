"""The width of a batch follows its proposals."""

import pytest

from ssd.engine.config import EngineConfig
from ssd.testing.sink import ListSink
from ssd.types import Request, SamplingParams
from ssd_target.decoding.batch_builder import BatchBuilder
from ssd_target.decoding.sequence import Arrival, Sequence

K = 3


def sequences(count: int) -> list[Sequence]:
    return [
        Sequence(
            arrival=Arrival(
                sequence_id=index,
                request=Request(
                    request_id=str(index), prompt_ids=(5, 6, 7), sampling=SamplingParams()
                ),
                eos_token_ids=frozenset(),
                sink=ListSink(),
            ),
            slot=index,
            blocks=[index + 1],
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("verify_columns", "proposed", "width"),
    [
        ((1, K + 1), {}, 1),
        ((1, K + 1), {0: ()}, 1),
        ((1, K + 1), {1: (8,)}, K + 1),
        ((K + 1,), {}, K + 1),
    ],
)
def test_only_a_round_with_proposals_has_more_than_one_column(
    verify_columns: tuple[int, ...], proposed: dict[int, tuple[int, ...]], width: int
) -> None:
    engine = EngineConfig(max_model_len=64, max_num_seqs=2, num_columns=K + 1)
    builder = BatchBuilder(engine, verify_columns)
    rows = sequences(2)
    for row in rows:
        builder.set_blocks(row.slot, row.blocks)
    proposals = builder.proposals(rows, proposed)
    batch = builder.round(rows, proposals)
    assert batch.tokens_BP.shape == (2, width)
    assert batch.tokens_BP[:, 0].tolist() == [7, 7]
    assert batch.num_columns_B.tolist() == [1 + len(proposed.get(index, ())) for index in (0, 1)]
    assert proposals.tokens_BK.shape == (2, width - 1)

"""A tree on a GPU mixes no devices; the host reads chosen columns, and candidates once a table."""

import pytest
from tests.fake_gpu import MODEL, on_fake_gpu

from ssd.engine.config import EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.speculation.fan_out import Adaptive
from ssd.testing.fake_device import fake_device
from ssd.types import OpenSession
from ssd_draft.sessions import Move
from ssd_draft.token_choice import KeyedChoice
from ssd_draft.tree import Tree

K, N = 3, 8
ENGINE = EngineConfig(max_model_len=512, max_num_seqs=4, num_columns=K + 1, branches=N)


@pytest.mark.parametrize(
    ("temperature", "top_k", "min_p"), [(0.0, 0, 0.0), (0.7, 0, 0.0), (0.7, 20, 0.05)]
)
def test_a_tree_reads_only_columns_and_candidates(
    temperature: float, top_k: int, min_p: float
) -> None:
    with fake_device() as device:
        runner = on_fake_gpu(DraftRunner, ENGINE, device)
        choice = KeyedChoice(ENGINE.max_num_seqs, device.name)
        tree = Tree(runner, choice, runner.engine, MODEL.vocab_size)
        slots = [2, 0]
        for slot in slots:
            opening = OpenSession(
                session=slot,
                token_ids=(5,),
                seed=2**64 - 1,
                temperature=temperature,
                max_len=64,
                top_k=top_k,
                min_p=min_p,
            )
            tree.open(slot, [1 + slot], opening)
            tree.start(slot, 5, ())
        ranked = device.num_reads
        assert ranked == 2 * len(slots), "ids and scores of each first pass"
        outcomes = tree.select_outcomes(slots, Adaptive())
        tree.keep(tree.begin_tables(slots, outcomes, K), [1])
        build = tree.begin_tables(slots, outcomes, K)
        for _ in range(K + 1):
            tree.run_step(build)
        assert build.depth == K
        assert device.num_reads - ranked == K, "each column once"
        tree.advance(slots, [Move(1, 7, (0, 0), 0), Move(1, 7, (3,), None, (4, 5))])
        assert device.num_reads - ranked - K <= 6, "ids and scores of each kind of proposal"

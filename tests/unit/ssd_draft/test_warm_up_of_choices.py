"""After the warm-up of a draft on a GPU, no choice of a table waits for a compiler."""

from pathlib import Path

import pytest
import torch
from tests.compiled_choices import compiled_choices
from tests.engines import load

from ssd.engine import static_execution
from ssd.engine.capture import Capture
from ssd.engine.config import STATIC, EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.sampling import soft_filters
from ssd.speculation.fan_out import Adaptive
from ssd.testing.recorded_graphs import RecordedGraphs
from ssd.testing.tiny_folder import VOCAB_SIZE, write_tiny_folder
from ssd.types import OpenSession
from ssd_draft import token_choice
from ssd_draft.sessions import Move
from ssd_draft.step_thread import _choice
from ssd_draft.tree import Tree

K = 2
EMBEDDING = VOCAB_SIZE + 3
"""A multiple of 4, as of most models; the number of token ids is none."""
assert EMBEDDING % 4 == 0


@torch.inference_mode()
def run_tables(tree: Tree, slots: list[int], temperature: float, top_k: int) -> None:
    """Open sessions, build tables and rank after them: an outcome of the table, and another one."""
    for slot in slots:
        opening = OpenSession(
            session=slot, token_ids=(5,), seed=7, temperature=temperature, max_len=64, top_k=top_k
        )
        tree.open(slot, [1 + slot], opening)
        tree.start(slot, 5, ())
    for branch in (0, None):
        build = tree.begin_tables(slots, tree.select_outcomes(slots, Adaptive()), K)
        while not build.is_complete:
            tree.run_step(build)
        bonus_B = build.outcomes.bonus_BN[:, 0].tolist()
        tree.advance(slots, [Move(1, bonus, (3,), branch) for bonus in bonus_B])


@pytest.mark.timeout(120)
def test_no_choice_of_a_padded_vocabulary_is_compiled_after_the_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one branch, so that one session has one row, and two sessions have several."""
    monkeypatch.setattr(static_execution, "capture_of", lambda _device: Capture(RecordedGraphs()))
    engine = EngineConfig(
        engine=STATIC,
        max_model_len=64,
        max_num_seqs=2,
        num_columns=K + 1,
        branches=1,
        prefill_chunk=16,
        num_token_ids=VOCAB_SIZE,
    )
    folder = write_tiny_folder(tmp_path / "model", vocab_size=EMBEDDING)
    runner = load(DraftRunner, folder, engine)
    with compiled_choices(token_choice, soft_filters) as compiler:
        tree = Tree(runner, _choice(runner, VOCAB_SIZE), engine, VOCAB_SIZE)
        warmed_up = compiler.num_graphs
        assert warmed_up > 0
        for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 2)):
            for slots in ([0], [1, 0]):
                run_tables(tree, slots, temperature, top_k)
        assert compiler.num_graphs == warmed_up

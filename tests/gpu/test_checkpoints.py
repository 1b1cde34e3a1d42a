"""Checkpoints with random weights."""

from pathlib import Path

import pytest
import torch
from tests.gpu.checkpoints import llama_pair
from tests.gpu.environment import Environment
from tests.gpu.models import block_tables, open_draft

from ssd.engine.batch import ProposalBatch


def test_too_little_space_skips_a_check_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("tests.gpu.checkpoints.shutil.disk_usage", lambda _path: usage)
    with pytest.raises(pytest.skip.Exception, match="name another folder with --scratch"):
        llama_pair(Environment(device="cpu", scratch=tmp_path))


def test_random_models_usually_continue_a_token_with_the_next_one(environment: Environment) -> None:
    runner = open_draft(llama_pair(environment).draft, environment, 1, 2)
    tokens_1P = torch.arange(20, 28)[None]
    zero_1 = torch.zeros(1, dtype=torch.int64)
    tables_1J = block_tables(1, 8, runner.engine.block_size)
    batch = ProposalBatch(zero_1, tokens_1P, zero_1 + 8, zero_1, tables_1J)
    best_1P = runner.run_proposals(batch).argmax(-1)
    assert int((best_1P == tokens_1P + 1).sum()) >= 5

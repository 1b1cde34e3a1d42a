"""A draft in bfloat16 and int8 chooses the tokens of its weights, as the reference reads them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.engines import load, on, store
from torch import Tensor

from ssd.engine.batch import BranchBatch, ProposalBatch
from ssd.engine.config import EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.precision import has_bfloat16
from ssd.testing.tiny_folder import write_tiny_folder

N, K = 48, 1
TEXT = [7 * token % 251 for token in range(61)]
ENGINE = EngineConfig(
    max_model_len=128, max_num_seqs=1, num_columns=K + 1, branches=N, prefill_chunk=32
)
TIE = 0.125
"""Difference of two scores that their rounding may reverse. Scores are around 10, so neighbouring
values of bfloat16 differ by 0.0625, and each of the two scores may be one such value off."""
BLOCKS_J = torch.arange(1, 9)
SLOT_B, LENGTH_B = torch.tensor([0]), torch.tensor([len(TEXT) - 1])


def as_stored(weight: Tensor, stored: str) -> Tensor:
    """A weight with the values that its stored format has; norms are not quantised."""
    if stored == "bfloat16":
        return weight.bfloat16().float()
    if weight.ndim == 1:
        return weight
    scales_O1 = weight.abs().amax(dim=1, keepdim=True) / 127
    return (weight / scales_O1).round() * scales_O1


def loaded(folder: Path, engine: EngineConfig) -> DraftRunner:
    runner = load(DraftRunner, folder, engine)
    store(runner, TEXT[:-1], BLOCKS_J)
    newest_BP, one_B = torch.tensor([TEXT[-1:] * (K + 1)]), torch.tensor([1])
    runner.run_proposals(ProposalBatch(SLOT_B, newest_BP, one_B, LENGTH_B, BLOCKS_J[None]))
    return runner


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_tokens_equal_those_of_the_reference_with_the_same_weights_but_for_ties(
    tmp_path: Path, stored: str
) -> None:
    if stored == "bfloat16" and not has_bfloat16():
        pytest.skip("this CPU has no bfloat16 arithmetic")
    given = write_tiny_folder(tmp_path / "given", max_len=128, attention_gain=8.0)
    same = write_tiny_folder(tmp_path / "same", max_len=128, attention_gain=8.0)
    weights = load_file(given / "model.safetensors")
    read = {name: as_stored(each.float(), stored) for name, each in weights.items()}
    save_file(read, same / "model.safetensors")
    engine = on("openvino", ENGINE)
    engine = (
        replace(engine, dtype="bfloat16")
        if stored == "bfloat16"
        else replace(engine, weights="int8")
    )
    found = loaded(given, engine)
    reference = loaded(same, on("torch", ENGINE))
    accepted_BN = torch.zeros((1, N), dtype=torch.int64)
    tokens_BN = torch.arange(N)[None] * 5
    num_equal = 0
    for step in range(K + 1):
        batch = BranchBatch(SLOT_B, tokens_BN, accepted_BN, step, LENGTH_B, BLOCKS_J[None])
        scores_NV = reference.run_branches(batch)[0]
        chosen_N1 = found.run_branches(batch)[0].argmax(dim=1, keepdim=True)
        lost_N = scores_NV.amax(dim=1) - scores_NV.gather(1, chosen_N1)[:, 0]
        assert (lost_N <= TIE).all()
        num_equal += int((lost_N == 0).sum())
        tokens_BN = scores_NV.argmax(dim=1)[None]
    assert num_equal > 0.9 * N * (K + 1)

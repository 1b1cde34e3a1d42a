"""What only the OpenVINO engine has: its errors, its check of bits, packed rows."""

from collections.abc import Callable
from pathlib import Path

import openvino
import pytest
import torch
from tests.engines import on

from ssd.engine.batch import PagedBatch
from ssd.engine.config import EngineConfig
from ssd.engine.openvino_engine.draft import group_by_width
from ssd.engine.openvino_engine.target import OpenVinoTarget
from ssd.engine.runner import load_runner
from ssd.engine.target_runner import TargetRunner
from ssd.errors import SettingsError, SetupError

Make = Callable[[EngineConfig], TargetRunner]
P = 4
ENGINE = on("openvino", EngineConfig(max_model_len=128, max_num_seqs=4, num_columns=P))


def test_a_graph_that_cannot_be_compiled_is_a_setup_error_with_the_reason(
    make_runner: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError(
            "Exception from src/plugin.cpp:54:\nCheck failed:\nno such instruction\n\n"
        )

    monkeypatch.setattr(openvino.Core, "compile_model", refuse)
    with pytest.raises(SetupError, match="no such instruction; set engine to torch"):
        make_runner(ENGINE)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(SettingsError, match="float32, not bfloat16"):
        on("openvino", EngineConfig(max_model_len=128, dtype="bfloat16"))


def test_a_pass_has_as_many_rows_as_its_sequences_have_columns(make_runner: Make) -> None:
    counts_B = torch.tensor([1, 4, 2])
    tables_BJ = torch.arange(1, 4)[:, None]
    batch = PagedBatch(torch.ones((3, P)).long(), counts_B * 0, counts_B, tables_BJ)
    packed = make_runner(ENGINE).prepare(batch)
    assert packed.inputs["tokens"].size == 7
    # The attention has no sequence of one row.
    assert packed.shape.inputs["subsequence_begins"].data.tolist() == [0, 2, 6, 8]


def test_sessions_share_a_pass_unless_padding_takes_longer() -> None:
    def groups(*lengths: int) -> list[list[int]]:
        return [each.tolist() for each in group_by_width(torch.tensor(lengths))]

    assert groups(100, 120) == [[0, 1]]
    assert groups(100, 3000, 90, 110) == [[0, 2, 3], [1]]
    assert groups(3000, 100) == [[1], [0]]
    assert groups(1500, 1800, 900) == [[0, 1, 2]]


def test_bits_that_depend_on_the_rows_select_one_shape(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenVinoTarget, "_has_same_bits", lambda *_: False)
    runner = load_runner(TargetRunner, folder, ENGINE, lambda _stage, _fraction: None)
    runner.warm_up(lambda _stage, _fraction: None)
    assert runner.verify_columns == (P,)
    one_B = torch.ones(1).long()
    batch = PagedBatch(one_B[:, None].expand(-1, P), one_B - 1, one_B, one_B[:, None])
    packed = runner.prepare(batch)
    assert packed.inputs["tokens"].size == ENGINE.max_num_seqs * P
    assert runner.verify(packed).shape[:2] == (1, P)

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.packing import AVX2_ERROR, fail_to_pack_bfloat16, needs_packed_bfloat16

import ssd
from ssd.engine import precision
from ssd.engine.layers.linear import packing_problem
from ssd.engine.precision import Precision, choose_precision


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU that cannot pack bfloat16 weights."""
    fail_to_pack_bfloat16(monkeypatch)
    yield
    monkeypatch.undo()
    packing_problem.cache_clear()


@needs_packed_bfloat16
@pytest.mark.parametrize(
    ("capabilities", "dtype", "reason"),
    [
        ({"avx512_bf16": True}, "bfloat16", "the CPU packs bfloat16 weights and multiplies them"),
        ({"avx512_bf16": False, "amx_bf16": True}, "bfloat16", "and multiplies them"),
        ({"avx512_bw": True, "avx512_bf16": False}, "float32", "has no bfloat16 arithmetic"),
        ({}, "float32", "none of avx512_bf16, amx_bf16, avx_ne_convert"),
    ],
)
def test_auto_is_bfloat16_where_the_cpu_packs_it_and_computes_in_it(
    capabilities: dict[str, bool], dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    found = choose_precision("auto", "cpu")
    assert found.dtype == dtype
    assert reason in found.reason


@pytest.mark.usefixtures("avx2")
def test_auto_is_float32_where_the_cpu_cannot_pack_bfloat16_and_names_the_cause() -> None:
    cause = AVX2_ERROR.partition("\n")[0]
    assert choose_precision("auto", "cpu") == Precision(
        "float32", f"this CPU cannot pack bfloat16 weights: {cause}"
    )


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_dtype_that_was_set_is_taken_on_every_cpu(dtype: str) -> None:
    assert choose_precision(dtype, "cpu") == Precision(dtype, "set explicitly")


@pytest.mark.parametrize(("asked", "device"), [("auto", "cuda:0"), ("float32", "cpu")])
def test_the_cpu_is_probed_only_where_its_result_is_needed(
    asked: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_dtype: object) -> None:
        raise AssertionError("probed")

    monkeypatch.setattr(precision, "packing_problem", fail)
    expected = "bfloat16" if device == "cuda:0" else "float32"
    assert choose_precision(asked, device).dtype == expected


def test_other_processes_read_what_auto_is_as_json() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "ssd.engine.precision"],
        cwd=Path(ssd.__file__).parents[1],
        check=True,
        capture_output=True,
    )
    found = json.loads(printed.stdout)
    assert Precision(**found) == choose_precision("auto", "cpu")

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
        (
            {"avx512_bf16": True},
            "bfloat16",
            "has packed weights and arithmetic for bfloat16",
        ),
        ({"avx512_bf16": False, "amx_bf16": True}, "bfloat16", "and arithmetic for bfloat16"),
        ({"avx512_bw": True, "avx512_bf16": False}, "float32", "has no bfloat16 arithmetic"),
        ({}, "float32", "none of avx512_bf16, amx_bf16, avx_ne_convert"),
    ],
)
def test_auto_is_bfloat16_if_the_cpu_packs_it_and_has_its_arithmetic(
    capabilities: dict[str, bool], dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    found = choose_precision("auto", "cpu")
    assert found.dtype == dtype
    assert reason in found.reason


@pytest.mark.usefixtures("avx2")
def test_auto_is_float32_with_the_reason_if_the_cpu_cannot_pack_bfloat16() -> None:
    cause = AVX2_ERROR.partition("\n")[0]
    assert choose_precision("auto", "cpu") == Precision(
        "float32", f"this CPU cannot pack bfloat16 weights: {cause}"
    )


@pytest.mark.usefixtures("avx2")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_explicit_dtype_is_used_on_every_cpu(dtype: str) -> None:
    assert choose_precision(dtype, "cpu") == Precision(dtype, "set explicitly")


@pytest.mark.parametrize(("requested", "device"), [("auto", "cuda:0"), ("float32", "cpu")])
def test_the_cpu_is_tested_only_if_the_result_is_needed(
    requested: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_dtype: object) -> None:
        raise AssertionError("probed")

    monkeypatch.setattr(precision, "packing_problem", fail)
    expected = "bfloat16" if device == "cuda:0" else "float32"
    assert choose_precision(requested, device).dtype == expected


def test_the_module_prints_the_choice_of_auto_as_json() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "ssd.engine.precision"],
        cwd=Path(ssd.__file__).parents[1],
        check=True,
        capture_output=True,
    )
    found = json.loads(printed.stdout)
    choice = choose_precision("auto", "cpu")
    assert found["dtype"] == choice.dtype
    assert found["reason"].startswith(choice.reason)

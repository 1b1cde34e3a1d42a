import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ssd
from ssd.engine.precision import TINY_MODEL, Precision, choose_precision, choose_weights


def with_cpu(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(names, True))


@pytest.mark.parametrize(
    ("capability", "dtype", "reason"),
    [
        ("avx512_bf16", "bfloat16", "has bfloat16 arithmetic"),
        ("amx_bf16", "bfloat16", "has bfloat16 arithmetic"),
        ("avx512_bw", "float32", "none of avx512_bf16, amx_bf16"),
        ("avx_ne_convert", "float32", "none of avx512_bf16, amx_bf16"),
    ],
)
def test_auto_is_bfloat16_if_the_cpu_has_its_arithmetic(
    capability: str, dtype: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cpu(monkeypatch, capability)
    found = choose_precision("auto", "cpu")
    assert found.dtype == dtype
    assert reason in found.reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_explicit_dtype_is_used_on_every_cpu(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cpu(monkeypatch)
    assert choose_precision(dtype, "cpu") == Precision(dtype, "set explicitly")


def test_auto_is_bfloat16_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpu(monkeypatch)
    assert choose_precision("auto", "cuda:0").dtype == "bfloat16"


@pytest.mark.parametrize("capability", ["avx512_vnni", "avx_vnni", "amx_int8"])
def test_auto_weights_are_int8_for_a_draft_and_unchanged_for_a_target(
    capability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_cpu(monkeypatch, capability)
    large = TINY_MODEL
    assert choose_weights("auto", is_draft=True, num_weights=large) == "int8"
    assert choose_weights("auto", is_draft=False, num_weights=large) == "same"
    assert choose_weights("auto", is_draft=True, num_weights=large - 1) == "same"
    with_cpu(monkeypatch, "avx2")
    assert choose_weights("auto", is_draft=True, num_weights=large) == "same"


@pytest.mark.parametrize("is_draft", [False, True])
@pytest.mark.parametrize("requested", ["same", "int8", "int4"])
def test_explicit_weights_are_used_on_every_cpu(
    requested: str, monkeypatch: pytest.MonkeyPatch, *, is_draft: bool
) -> None:
    with_cpu(monkeypatch)
    assert choose_weights(requested, is_draft=is_draft, num_weights=1) == requested


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

"""The engine and the precision of the settings, and the choices of ``auto`` by what a CPU has."""

from typing import Any

import pytest
import torch

from ssd.engine import engine_choice
from ssd.engine.engine_choice import EngineChoice, choose_engine
from ssd.engine.precision import SMALL_MODEL, TINY_MODEL, keeps_bfloat16
from ssd.errors import SettingsError
from ssd_target.settings import TargetSettings

DRAFT = {"is_draft": True}
ON_GPU = {"device": "cuda:0"}


def choose(
    *, num_weights: int = SMALL_MODEL, is_draft: bool = False, **settings: Any
) -> EngineChoice:
    """The choice for a target, or a draft, that is not small."""
    return choose_engine(
        TargetSettings(**settings), num_weights=num_weights, head_size=64, is_draft=is_draft
    )


@pytest.mark.parametrize(
    ("capability", "settings", "expected"),
    [
        ("avx2", {}, ("openvino", "float32", "same")),
        ("avx_ne_convert", {}, ("openvino", "float32", "same")),
        ("avx512_bf16", {}, ("openvino", "bfloat16", "same")),
        ("amx_bf16", {}, ("openvino", "bfloat16", "same")),
        ("avx512_bf16", {"num_weights": TINY_MODEL}, ("openvino", "bfloat16", "same")),
        ("avx512_bf16", {"num_weights": TINY_MODEL - 1}, ("openvino", "float32", "same")),
        ("amx_bf16", {"num_weights": TINY_MODEL - 1}, ("openvino", "bfloat16", "same")),
        ("avx512_vnni", {}, ("openvino", "float32", "same")),
        ("avx512_vnni", DRAFT, ("openvino", "float32", "int8")),
        ("avx_vnni", DRAFT, ("openvino", "float32", "int8")),
        ("amx_int8", DRAFT, ("openvino", "float32", "int8")),
        ("amx_int8", DRAFT | {"num_weights": TINY_MODEL - 1}, ("openvino", "float32", "same")),
        ("avx512_vnni", DRAFT | {"weights": "same"}, ("openvino", "float32", "same")),
        ("avx512_bf16", DRAFT, ("openvino", "bfloat16", "same")),
        ("avx2", {"weights": "int8"}, ("openvino", "float32", "int8")),
        ("avx512_bf16", {"weights": "int4"}, ("openvino", "float32", "int4")),
        ("amx_bf16", {"engine": "torch"}, ("torch", "float32", "same")),
        ("amx_bf16", {"engine": "torch", "dtype": "bfloat16"}, ("torch", "bfloat16", "same")),
        ("avx2", {"dtype": "bfloat16"}, ("torch", "bfloat16", "same")),
        ("avx2", {"tensor_parallel_size": 2}, ("torch", "float32", "same")),
        ("avx2", {"engine": "static", "attention": "reference"}, ("static", "float32", "same")),
        ("avx2", ON_GPU, ("static", "bfloat16", "same")),
        ("avx512_vnni", ON_GPU | DRAFT, ("static", "bfloat16", "same")),
        # Whether the package is installed is known only where the process runs.
        ("avx2", ON_GPU | {"attention": "flash_attn"}, ("static", "bfloat16", "same")),
        ("avx2", ON_GPU | {"attention": "flex"}, ("static", "bfloat16", "same")),
    ],
)
def test_the_fastest_engine_and_precision_of_a_machine_are_chosen(
    capability: str,
    settings: dict[str, Any],
    expected: tuple[str, str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    choice = choose(**settings)
    assert (choice.engine, choice.precision.dtype, choice.weights) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "openvino", "dtype": "bfloat16"}, "this CPU has no bf.*to torch or auto"),
        ({"engine": "openvino", "tensor_parallel_size": 2}, "tensor_parallel_size is 2; set"),
        (ON_GPU | {"engine": "openvino"}, "engine openvino runs on CPUs.*cuda:0.*auto"),
        (ON_GPU | {"engine": "torch"}, "engine torch runs on CPUs.*cuda:0.*auto"),
        (ON_GPU | {"weights": "int8"}, "weights int8 needs engine openvino.*same"),
        ({"engine": "torch", "weights": "int4"}, "weights int4 needs engine openvino.*same"),
        ({"attention": "reference"}, "attention reference needs engine static, not openvino"),
        (ON_GPU | {"attention": "nope"}, "attention nope: it is not one of auto, flash_attn"),
        (ON_GPU | {"attention": "flash_attn", "dtype": "float32"}, "the dtype is float32.*auto"),
        ({"engine": "static", "attention": "flex"}, "it runs on CUDA, and the device is cpu.*auto"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_with_a_hint(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(SettingsError, match=words):
        choose(**settings)


@pytest.mark.parametrize(
    ("capabilities", "num_weights", "expected"),
    [
        (("avx2",), SMALL_MODEL, "kept"),
        (("avx2",), SMALL_MODEL - 1, "converted"),
        (("avx2", "avx512_f"), SMALL_MODEL, "converted"),
        ((), SMALL_MODEL, "converted"),
    ],
)
def test_weights_stay_in_bfloat16_where_few_rows_have_no_kernel_of_their_own(
    capabilities: tuple[str, ...], num_weights: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(capabilities, True))
    assert keeps_bfloat16(num_weights) is (expected == "kept")


def test_without_the_package_auto_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "find_spec", lambda _name: None)
    choice = choose(dtype="float32")
    assert (choice.engine, choice.reason) == ("torch", "the package openvino is not installed")
    with pytest.raises(SettingsError, match="not installed"):
        choose(engine="openvino")

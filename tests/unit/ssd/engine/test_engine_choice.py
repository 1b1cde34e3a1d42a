"""The engine and the precision of the settings, and the choice of ``auto``."""

from typing import Any

import pytest
import torch

from ssd.engine import engine_choice
from ssd.engine.engine_choice import EngineChoice, EngineRequest, choose_engine
from ssd.engine.precision import SMALL_MODEL
from ssd.errors import SettingsError


@pytest.fixture(params=["avx2", "avx512_bf16", "amx_bf16"])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the CPU has, besides instructions for int8."""
    names = dict.fromkeys((request.param, "avx512_vnni"), True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: names)
    return str(request.param)


def choose(**settings: Any) -> EngineChoice:
    """The choice for a model that is not small."""
    return choose_engine(EngineRequest(**{"num_weights": SMALL_MODEL} | settings))


def test_auto_is_openvino_on_every_cpu_in_its_fastest_dtype(capability: str) -> None:
    choice = choose()
    assert choice.engine == "openvino"
    assert choice.precision.dtype == ("float32" if capability == "avx2" else "bfloat16")
    assert choice.weights == "same"


def test_a_small_model_is_float32_on_cpus_without_amx(capability: str) -> None:
    choice = choose(num_weights=SMALL_MODEL - 1)
    expected = "bfloat16" if capability == "amx_bf16" else "float32"
    assert (choice.engine, choice.precision.dtype) == ("openvino", expected)


@pytest.mark.usefixtures("capability")
def test_the_reference_is_float32_unless_another_dtype_is_set() -> None:
    choice = choose(engine="torch")
    assert (choice.engine, choice.precision.dtype) == ("torch", "float32")
    assert choose(engine="torch", dtype="bfloat16").precision.dtype == "bfloat16"


@pytest.mark.usefixtures("capability")
def test_a_draft_has_int8_weights_and_float32_elsewhere() -> None:
    choice = choose(is_draft=True)
    assert (choice.engine, choice.weights, choice.precision.dtype) == (
        *("openvino", "int8"),
        "float32",
    )
    assert choose(is_draft=True, weights="same").weights == "same"
    assert choose(is_draft=True, device="cuda:0").weights == "same"


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("settings", [{"engine": "torch"}, {"device": "cuda:0"}])
def test_quantised_weights_need_openvino(weights: str, settings: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=f"weights {weights} needs engine openvino.*same"):
        choose(weights=weights, **settings)
    assert choose(weights=weights).weights == weights


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "bfloat16"}, "dtype is bfloat16, and this CPU has no"),
        ({"attention": "reference"}, "attention backend reference"),
        ({"tensor_parallel_size": 2}, "it runs on one rank, and tensor_parallel_size is 2"),
    ],
)
def test_what_openvino_cannot_run_is_refused_or_left_to_torch(
    settings: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    with pytest.raises(SettingsError, match=f"engine openvino: .*{words}.*torch or auto"):
        choose(engine="openvino", **settings)
    choice = choose(**settings)
    assert choice.engine == "torch"
    assert words in choice.reason


def test_without_the_package_auto_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "find_spec", lambda _name: None)
    choice = choose(dtype="float32")
    assert (choice.engine, choice.reason) == ("torch", "the package openvino is not installed")
    with pytest.raises(SettingsError, match="not installed"):
        choose(engine="openvino")


@pytest.mark.parametrize(
    ("dtype", "device", "attention", "words"),
    [
        ("auto", "cuda:0", "cpu", "it runs on CPUs, and the device is cuda:0"),
        ("float32", "cuda:0", "flash_attn", "the dtype is float32"),
        ("auto", "cpu", "flash_attn", "it runs on CUDA, and the device is cpu"),
        ("auto", "cpu", "flex", "it runs on CUDA, and the device is cpu"),
    ],
)
def test_attention_of_another_device_or_dtype_is_refused(
    dtype: str, device: str, attention: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=f"attention {attention}: .*{words}.*auto"):
        choose(dtype=dtype, device=device, attention=attention)


@pytest.mark.parametrize(
    ("device", "attention"),
    [("cuda", "auto"), ("cuda", "flash_attn"), ("cuda", "flex"), ("cuda:1", "reference")],
)
def test_attention_on_cuda_needs_no_package_before_the_process_runs(
    device: str, attention: str
) -> None:
    choice = choose(device=device, attention=attention)
    assert (choice.engine, choice.precision.dtype) == ("static", "bfloat16")


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_an_engine_of_cpus_is_refused_on_a_gpu(engine: str) -> None:
    with pytest.raises(SettingsError, match=f"engine {engine} runs on CPUs.*cuda:0.*auto"):
        choose(engine=engine, device="cuda:0")


def test_the_engine_of_gpus_can_be_tried_on_a_cpu() -> None:
    choice = choose(engine="static", dtype="float32")
    assert (choice.engine, choice.reason) == ("static", "set explicitly")

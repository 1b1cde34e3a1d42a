"""The engine of the settings, and the choice of ``auto``."""

import pytest

from ssd.engine import engine_choice
from ssd.engine.engine_choice import choose_engine
from ssd.engine.precision import SMALL_MODEL, Precision
from ssd.errors import SettingsError

LARGE = SMALL_MODEL


@pytest.fixture(params=["float32", "bfloat16"])
def automatic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The dtype that ``auto`` selects."""

    def choose(requested: str, _device: str) -> Precision:
        return Precision(request.param if requested == "auto" else requested, "a reason")

    monkeypatch.setattr(engine_choice, "choose_precision", choose)
    return str(request.param)


def test_auto_is_openvino_where_the_dtype_is_float32(automatic: str) -> None:
    choice = choose_engine("auto", "auto", "cpu", "cpu", num_weights=LARGE)
    assert choice.engine == ("openvino" if automatic == "float32" else "torch")
    assert choice.precision.dtype == automatic
    assert choose_engine("auto", "float32", "cpu", "cpu", num_weights=LARGE).engine == "openvino"


@pytest.mark.usefixtures("automatic")
def test_a_small_model_is_float32_with_openvino() -> None:
    choice = choose_engine("auto", "auto", "cpu", "cpu", num_weights=SMALL_MODEL - 1)
    assert (choice.engine, choice.precision.dtype) == ("openvino", "float32")


def test_a_small_model_on_torch_has_the_fastest_dtype_of_torch(automatic: str) -> None:
    choice = choose_engine("torch", "auto", "cpu", "cpu", num_weights=SMALL_MODEL - 1)
    assert (choice.engine, choice.precision.dtype) == ("torch", automatic)
    choice = choose_engine("auto", "auto", "cpu", "reference", num_weights=SMALL_MODEL - 1)
    assert (choice.engine, choice.precision.dtype) == ("torch", automatic)


@pytest.mark.usefixtures("automatic")
def test_openvino_computes_in_float32() -> None:
    choice = choose_engine("openvino", "auto", "cpu", "cpu", num_weights=LARGE)
    assert (choice.engine, choice.precision.dtype) == ("openvino", "float32")


@pytest.mark.parametrize(
    ("dtype", "device", "attention", "words"),
    [
        ("bfloat16", "cpu", "cpu", "dtype is bfloat16"),
        ("float32", "cpu", "reference", "attention backend reference"),
    ],
)
def test_what_openvino_cannot_run_is_refused_or_left_to_torch(
    dtype: str, device: str, attention: str, words: str
) -> None:
    with pytest.raises(SettingsError, match=f"engine openvino: .*{words}.*torch or auto"):
        choose_engine("openvino", dtype, device, attention, num_weights=LARGE)
    choice = choose_engine("auto", dtype, device, attention, num_weights=LARGE)
    assert choice.engine == "torch"
    assert words in choice.reason


def test_without_the_package_auto_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "find_spec", lambda _name: None)
    choice = choose_engine("auto", "float32", "cpu", "cpu", num_weights=LARGE)
    assert (choice.engine, choice.reason) == ("torch", "the package openvino is not installed")
    with pytest.raises(SettingsError, match="not installed"):
        choose_engine("openvino", "auto", "cpu", "cpu", num_weights=LARGE)


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
        choose_engine("auto", dtype, device, attention, num_weights=LARGE)


@pytest.mark.parametrize(
    ("device", "attention"),
    [("cuda", "auto"), ("cuda", "flash_attn"), ("cuda", "flex"), ("cuda:1", "reference")],
)
def test_attention_on_cuda_needs_no_package_before_the_process_runs(
    device: str, attention: str
) -> None:
    choice = choose_engine("auto", "auto", device, attention, num_weights=LARGE)
    assert (choice.engine, choice.precision.dtype) == ("static", "bfloat16")


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_an_engine_of_cpus_is_refused_on_a_gpu(engine: str) -> None:
    with pytest.raises(SettingsError, match=f"engine {engine} runs on CPUs.*cuda:0.*auto"):
        choose_engine(engine, "auto", "cuda:0", "auto", num_weights=LARGE)


def test_the_engine_of_gpus_can_be_tried_on_a_cpu() -> None:
    choice = choose_engine("static", "float32", "cpu", "auto", num_weights=LARGE)
    assert (choice.engine, choice.reason) == ("static", "set explicitly")


def test_the_default_attention_is_that_of_openvino_on_a_cpu() -> None:
    assert choose_engine("auto", "float32", "cpu", "auto", num_weights=LARGE).engine == "openvino"


def test_several_ranks_run_on_torch() -> None:
    choice = choose_engine(
        "auto", "float32", "cpu", "cpu", tensor_parallel_size=2, num_weights=LARGE
    )
    assert choice.engine == "torch"
    assert choice.reason == "it runs on one rank, and tensor_parallel_size is 2"
    with pytest.raises(SettingsError, match="engine openvino: it runs on one rank"):
        choose_engine(
            "openvino", "float32", "cpu", "cpu", tensor_parallel_size=2, num_weights=LARGE
        )

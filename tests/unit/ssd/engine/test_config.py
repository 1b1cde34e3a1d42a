import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ssd.engine.config import FAMILIES, EngineConfig, ModelConfig, RopeScaling
from ssd.errors import ModelNotFoundError, SettingsError, UnsupportedModelError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
}


def write(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def test_missing_values_of_a_config_are_derived(tmp_path: Path) -> None:
    model = ModelConfig.from_folder(write(tmp_path))
    assert (model.num_kv_heads, model.head_size) == (4, 8)
    assert (model.rope_theta, model.rope_scaling) == (10000.0, None)
    assert not model.tie_word_embeddings


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("given", [{}, {"num_key_value_heads": None}, {"head_dim": 16}])
def test_missing_values_of_a_config_are_those_of_transformers(
    tmp_path: Path, family: str, given: dict[str, object]
) -> None:
    config = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"}
    config |= {"num_attention_heads": 64, "hidden_size": 512} | given
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": family}))
    kind = {"llama": "LlamaConfig", "qwen3": "Qwen3Config"}[family]
    expected: Any = getattr(import_module("transformers"), kind)(**config)
    model = ModelConfig.from_folder(tmp_path)
    assert model.num_kv_heads == expected.num_key_value_heads
    assert model.head_size == expected.head_dim
    assert model.rms_norm_eps == expected.rms_norm_eps
    assert model.rope_theta == expected.rope_parameters["rope_theta"]
    assert model.max_position_embeddings == expected.max_position_embeddings
    assert model.tie_word_embeddings == expected.tie_word_embeddings


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_is_read_from_old_and_new_configs(tmp_path: Path, place: str) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    model = ModelConfig.from_folder(write(tmp_path, **{place: rope}))
    assert model.rope_theta == 5e5
    assert model.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )


def test_a_config_with_old_and_new_rope_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    scaling = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    new = {"rope_type": "default", "rope_theta": 500.0}
    model = ModelConfig.from_folder(write(tmp_path, rope_parameters=new, rope_theta=1e4))
    assert (model.rope_theta, model.rope_scaling) == (500.0, None)
    model = ModelConfig.from_folder(write(tmp_path, rope_parameters=new, rope_scaling=scaling))
    assert model.rope_theta == 1e4
    assert model.rope_scaling is not None
    with pytest.raises(UnsupportedModelError, match="'yarn'"):
        ModelConfig.from_folder(
            write(tmp_path, rope_parameters=new, rope_scaling={"rope_type": "yarn"})
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba' is not supported; supported: llama, qwen3"),
        ({"model_type": None}, r"None is not supported; supported: llama, qwen3"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"mlp_bias": True}, "mlp_bias=true"),
        ({"use_sliding_window": True}, "use_sliding_window=true"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope scaling 'yarn'"),
        (
            {"partial_rotary_factor": 0.5, "rope_scaling": {"rope_type": "llama3"}},
            "partial_rotary_factor 0.5",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_an_unsupported_feature_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_folder(write(tmp_path, **changes))


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_model_with_an_adapter_is_refused(tmp_path: Path, name: str) -> None:
    (write(tmp_path) / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / name).touch()
    with pytest.raises(
        UnsupportedModelError, match=r"LoRA adapters .* remove adapter_config\.json"
    ):
        ModelConfig.from_folder(tmp_path)


def test_a_merged_model_can_keep_the_config_of_its_adapter(tmp_path: Path) -> None:
    (write(tmp_path) / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert ModelConfig.from_folder(tmp_path).family == "llama"


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such model folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}', "\x00"])
def test_an_incomplete_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_value_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="many"):
        ModelConfig.from_folder(write(tmp_path, vocab_size="many"))


@pytest.mark.parametrize(
    ("key", "size", "problem"),
    [
        ("num_hidden_layers", 0, "num_hidden_layers is 0, must be at least 1"),
        ("num_hidden_layers", None, "num_hidden_layers is None, must be a whole number"),
        ("hidden_size", 1.5, "hidden_size is 1.5, must be a whole number"),
        ("hidden_size", None, "hidden_size is None, must be a whole number"),
        ("hidden_size", -64, "hidden_size is -64"),
        ("head_dim", 0, "head_dim is 0"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("num_key_value_heads", 3, "4 is not a multiple of num_key_value_heads 3"),
        ("rope_theta", None, "rope_theta is None, must be a number above 0"),
        ("rope_theta", 0, "rope_theta is 0"),
        ("rms_norm_eps", "small", "rms_norm_eps is 'small'"),
    ],
)
def test_a_value_that_no_model_can_have_is_refused(
    tmp_path: Path, key: str, size: object, problem: str
) -> None:
    with pytest.raises(ModelNotFoundError, match=rf"config\.json: .*{problem}"):
        ModelConfig.from_folder(write(tmp_path, **{key: size}))


@pytest.mark.parametrize(
    ("lookahead", "branches", "lengths"),
    [(1, 4, (1,)), (2, 4, (1, 2)), (3, 4, (2, 3)), (6, 24, (3, 6)), (6, 1, (6,))],
)
def test_whole_tables_have_all_columns_or_half_of_them(
    lookahead: int, branches: int, lengths: tuple[int, ...]
) -> None:
    engine = EngineConfig(max_model_len=64, num_columns=lookahead + 1, branches=branches)
    assert engine.table_lengths == lengths


def test_an_unknown_dtype_or_an_invalid_chunk_is_refused() -> None:
    with pytest.raises(SettingsError, match="'float16' is not one of bfloat16, float32"):
        EngineConfig(max_model_len=64, dtype="float16")
    with pytest.raises(SettingsError, match="context_chunk 100 is not a multiple of block_size 16"):
        EngineConfig(max_model_len=64, context_chunk=100)


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_only_the_engine_static_compiles_layers(engine: str) -> None:
    with pytest.raises(SettingsError, match=f"compile_layers needs engine static, not {engine}"):
        EngineConfig(max_model_len=64, engine=engine, compile_layers=True)

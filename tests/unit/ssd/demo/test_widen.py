import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tools.distill.model import Shape, TrainableLlama, load_model, rotary_tables, rotate, save_model
from torch import Tensor

from ssd.demo.widen import widen, widened_config, widened_tensor
from ssd.errors import ModelNotFoundError, SetupError, UnsupportedModelError

SHAPE = Shape(
    vocab_size=97, width=24, num_layers=2, num_heads=4, num_kv_heads=2, head_size=8, mlp_width=40
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = TrainableLlama(SHAPE)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    folder = tmp_path / "source"
    save_model(model, folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


def token_ids() -> Tensor:
    return torch.randint(0, 97, (3, 17), generator=torch.Generator().manual_seed(5))


def reference_logits(folder: Path, token_ids_S: Tensor) -> Tensor:
    """A second forward pass, written out of plain float64 products and sharing no layer."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights: dict[str, Tensor] = {
        name: value.double() for name, value in load_file(folder / "model.safetensors").items()
    }
    size, eps = config["head_dim"], config["rms_norm_eps"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    cos_SE, sin_SE = (table[: len(token_ids_S)].double() for table in rotary_tables(SHAPE))

    def norm(x_SD: Tensor, name: str) -> Tensor:
        scale_S1: Tensor = torch.rsqrt(x_SD.pow(2).mean(-1, keepdim=True) + eps)
        return weights[name] * x_SD * scale_S1

    def heads(x_SD: Tensor, name: str) -> Tensor:
        return (x_SD @ weights[name].T).view(len(x_SD), -1, size).transpose(0, 1)

    x_SD = weights["model.embed_tokens.weight"][token_ids_S]
    future_SS = torch.ones(len(token_ids_S), len(token_ids_S)).triu(1).bool()
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        y_SD = norm(x_SD, prefix + "input_layernorm.weight")
        q_HSE = rotate(heads(y_SD, prefix + "self_attn.q_proj.weight"), cos_SE, sin_SE)
        k_GSE = rotate(heads(y_SD, prefix + "self_attn.k_proj.weight"), cos_SE, sin_SE)
        v_GSE = heads(y_SD, prefix + "self_attn.v_proj.weight")
        mixed = []
        for head in range(len(q_HSE)):
            scores_SS = q_HSE[head] @ k_GSE[head // group].T / size**0.5
            mixed.append(
                scores_SS.masked_fill(future_SS, -torch.inf).softmax(-1) @ v_GSE[head // group]
            )
        x_SD = x_SD + torch.cat(mixed, dim=-1) @ weights[prefix + "self_attn.o_proj.weight"].T
        y_SD = norm(x_SD, prefix + "post_attention_layernorm.weight")
        gate_SD = y_SD @ weights[prefix + "mlp.gate_proj.weight"].T
        up_SD = y_SD @ weights[prefix + "mlp.up_proj.weight"].T
        inner_SD = gate_SD * gate_SD.sigmoid() * up_SD
        x_SD = x_SD + inner_SD @ weights[prefix + "mlp.down_proj.weight"].T
    return norm(x_SD, "model.norm.weight") @ weights["model.embed_tokens.weight"].T


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_a_widened_model_has_the_logits_of_the_original(
    source: Path, tmp_path: Path, factor: int
) -> None:
    wider = widen(source, factor, tmp_path / "wider")
    token_ids_BS = token_ids()
    with torch.no_grad():
        wanted_BSV = load_model(source)(token_ids_BS)
        found_BSV = load_model(wider)(token_ids_BS)
    assert relative_difference(found_BSV, wanted_BSV) <= 1e-5


def test_an_independent_reference_gives_equal_logits_for_both(source: Path, tmp_path: Path) -> None:
    wider = widen(source, 4, tmp_path / "wider")
    token_ids_BS = token_ids()
    with torch.no_grad():
        model_SV = load_model(source)(token_ids_BS)[0].double()
    wanted_SV = reference_logits(source, token_ids_BS[0])
    assert relative_difference(model_SV, wanted_SV) <= 1e-5
    assert relative_difference(reference_logits(wider, token_ids_BS[0]), wanted_SV) <= 1e-12


def test_sizes_grow_by_the_factor_and_a_head_keeps_its_own(source: Path, tmp_path: Path) -> None:
    shape = load_model(widen(source, 4, tmp_path / "wider")).shape
    assert (shape.width, shape.num_heads, shape.num_kv_heads, shape.mlp_width) == (96, 16, 8, 160)
    assert (shape.head_size, shape.num_layers, shape.vocab_size) == (8, 2, 97)


def test_the_tokenizer_is_copied_and_no_temporary_file_remains(
    source: Path, tmp_path: Path
) -> None:
    wider = widen(source, 2, tmp_path / "models" / "wider")
    assert (wider / "tokenizer.json").read_text(encoding="utf-8") == "{}"
    assert [file.name for file in wider.parent.iterdir()] == ["wider"]


def test_an_equal_folder_is_reused_and_another_is_refused(source: Path, tmp_path: Path) -> None:
    wider = widen(source, 2, tmp_path / "wider")
    before = (wider / "model.safetensors").stat().st_mtime_ns
    assert widen(source, 2, wider) == wider
    assert (wider / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(SetupError, match="not this model widened by 4"):
        widen(source, 4, wider)


def test_what_cannot_be_widened_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot widen by 3"):
        widen(source, 3, tmp_path / "wider")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        widen(tmp_path / "nothing", 2, tmp_path / "wider")
    with pytest.raises(UnsupportedModelError, match="'gpt2'"):
        widened_config({"model_type": "gpt2"}, 2)
    with pytest.raises(UnsupportedModelError, match="rotary"):
        widened_tensor("model.rotary.weight", torch.ones(2), 2)


def test_a_qwen3_keeps_its_head_norms_and_an_untied_head_is_repeated() -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    assert widened_config(config, 2)["head_dim"] == 8
    norm_E = torch.rand(8)
    assert torch.equal(widened_tensor("model.layers.0.self_attn.q_norm.weight", norm_E, 2), norm_E)
    assert widened_tensor("lm_head.weight", torch.ones(5, 16), 2).shape == (5, 32)
    assert widened_tensor("model.layers.0.self_attn.q_proj.bias", torch.ones(3), 2).shape == (6,)

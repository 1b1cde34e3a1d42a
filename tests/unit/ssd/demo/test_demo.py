import json
from typing import Any

import pytest
from safetensors import safe_open
from tools.distill.model import DRAFT, TARGET
from tools.distill.package import MAX_PAIR_BYTES

from ssd.demo import folder, is_demo, widening
from ssd.errors import ModelNotFoundError

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_packaged_folder_is_complete(name: str) -> None:
    packaged = folder(f"demo://{name}")
    assert packaged == folder(name)
    template = {"chat_template.jinja"} if name == "target" else set()
    assert {file.name for file in packaged.iterdir()} == FILES | template


@pytest.mark.parametrize(("name", "config"), [("target", TARGET), ("draft", DRAFT)])
def test_packaged_weights_are_bf16_and_of_the_shape_that_is_trained(
    name: str, config: dict[str, Any]
) -> None:
    assert json.loads((folder(name) / "config.json").read_text(encoding="utf-8")) == config
    with safe_open(folder(name) / "model.safetensors", framework="pt") as weights:
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [config["vocab_size"], config["hidden_size"]]
        assert embedding.get_dtype() == "BF16"
        assert len(weights.keys()) == 2 + 9 * config["num_hidden_layers"]


def test_the_pair_is_small_enough_for_the_repository() -> None:
    files = [file for name in ("target", "draft") for file in folder(name).iterdir()]
    assert sum(file.stat().st_size for file in files) <= MAX_PAIR_BYTES


def test_a_query_changes_the_factor_and_not_the_folder() -> None:
    assert folder("demo://draft?widen=4") == folder("draft")
    assert widening("demo://draft?widen=4") == 4
    assert widening("demo://draft") == 1
    assert is_demo("demo://draft?widen=4")
    assert not is_demo("/models/draft")


@pytest.mark.parametrize(
    "name", ["demo://judge", "", "../target", "demo://target?widen=3", "demo://target?wide=2"]
)
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"demo://target|factor"):
        folder(name)

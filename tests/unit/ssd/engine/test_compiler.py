from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.engine.compiler import compiled_by_shape, require_compiler
from ssd.engine.config import EngineConfig
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.parallel.group import ALONE
from ssd.engine.static_execution import load
from ssd.errors import SettingsError


@pytest.mark.parametrize(
    ("setting", "advice", "settings"),
    [
        ("compile_layers", "set it to false", {"compile_layers": True}),
        ("attention flex", "attention auto and dtype bfloat16", {"attention": "flex"}),
    ],
)
def test_generated_kernels_on_a_gpu_without_a_c_compiler_are_refused_before_the_load(
    setting: str,
    advice: str,
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    engine = EngineConfig(
        max_model_len=64, device="cuda:0", dtype="bfloat16", engine="static", **settings
    )
    model = KNOWN_SHAPES["llama-3.2-1b"]
    with pytest.raises(SettingsError, match=f"{setting} needs a C compiler") as refused:
        load(tmp_path, model, engine, lambda _: None, ALONE)
    assert "\n" not in str(refused.value)
    assert str(refused.value).endswith(advice)


def test_generated_kernels_need_a_c_compiler_only_with_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    require_compiler("cpu", "compile_layers", "set it to false")
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    require_compiler("cuda:0", "compile_layers", "set it to false")


@pytest.mark.parametrize(("version", "is_new"), [("2.13.0", True), ("2.11.0+cu130", False)])
def test_generated_kernels_have_sums_of_one_order_where_torch_offers_them(
    *, version: str, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda _function, **options: given.append(options))
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
    config: Any = torch.compiler.config
    with config.patch(recompile_limit=8):
        compiled_by_shape(torch.add)
        compiled_by_shape(torch.add, has_one_order=False)
        compiled_by_shape(torch.add, "aot_eager")
    found = [each.get("options", {}).get("batch_invariant", False) for each in given]
    assert found == [is_new, False, False]
    assert ["recompile_limit" in each for each in given] == [is_new] * 3


@pytest.mark.timeout(60)
def test_every_thread_may_compile_more_shapes_than_the_default_of_torch() -> None:
    def negative(values: torch.Tensor) -> torch.Tensor:
        return -values

    compiled = compiled_by_shape(negative, "eager")
    with ThreadPoolExecutor() as pool:
        shapes = [tuple(each.shape) for each in pool.map(compiled, map(torch.ones, range(1, 12)))]
    assert shapes == [(size,) for size in range(1, 12)]

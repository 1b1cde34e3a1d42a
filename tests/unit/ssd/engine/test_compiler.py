from pathlib import Path
from typing import Any

import pytest

from ssd.engine.compiler import require_compiler
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

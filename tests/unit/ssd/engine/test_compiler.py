from pathlib import Path

import pytest

from ssd.engine.compiler import require_compiler
from ssd.errors import SettingsError


def test_compiled_layers_on_a_gpu_without_a_c_compiler_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    require_compiler("cpu")
    with pytest.raises(SettingsError, match="compile_layers needs a C compiler") as refused:
        require_compiler("cuda:0")
    assert "\n" not in str(refused.value)
    compiler = tmp_path / "gcc"
    compiler.touch(mode=0o755)
    require_compiler("cuda:0")

"""The name of a run, which changes with all that changes a measurement."""

import os
from pathlib import Path

import pytest

import ssd
from ssd_bench import identity as named
from ssd_bench import runs
from ssd_bench.identity import identity


def test_what_changes_a_measurement_changes_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, code = tmp_path / "model", tmp_path / "code"
    for folder in (model, code):
        folder.mkdir()
    (model / "weights").write_text("1")
    (code / "engine.py").write_text("1")
    monkeypatch.setattr(named, "SOURCES", code)

    def name(lookahead: str = "6", text: str = "x = 1") -> str:
        return identity({"lookahead": lookahead}, {"demo": [text]}, [model])

    names = [name()]
    assert name() == names[0]
    names += [name(lookahead="5"), name(text="x = 2")]
    os.utime(model / "weights", (1, 1))
    names.append(name())
    os.utime(code / "engine.py", (1, 1))
    names.append(name())
    monkeypatch.setattr(named, "machine", lambda: "another one")
    names.append(name())
    monkeypatch.setenv("SSD_TARGET_WEIGHTS", "int8")
    names.append(name())
    monkeypatch.setattr(named, "_version", lambda _: "another one")
    names.append(name())
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {99})
    names.append(name())
    assert len(set(names)) == len(names)


def test_the_name_covers_the_code_of_this_product() -> None:
    assert Path(ssd.__file__).is_relative_to(named.SOURCES)
    assert Path(runs.__file__).is_relative_to(named.SOURCES)

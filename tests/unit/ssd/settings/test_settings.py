import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ssd
from ssd.errors import SettingsError
from ssd.settings import Loaded, field_help, find_text, load, to_json
from ssd_draft.settings import DraftSettings
from ssd_target.settings import TargetSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What a test process can be told."""

    port: int = field(default=50051, metadata={"min": 0, "max": 65535})
    """Port to listen on;
    0 lets the system choose."""
    http_port: int = 9090
    patience: float = field(default=1.5, metadata={"min": 0.0})
    """Seconds, 50% of which nobody uses."""
    quiet: bool = False
    """Say less."""
    name: str = ""
    """Name of the model."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights."""
    level: Literal[1, 2] = 1
    """How much."""
    split: tuple[int, ...] = ()
    """Numbers."""
    limit: int | None = field(default=None, metadata={"max": 10})
    """At most so many."""

    def __post_init__(self) -> None:
        if self.port and self.port == self.http_port:
            raise SettingsError(f"port and http_port are both {self.port}")


def knobs(*argv: str, **environ: str) -> Loaded[Knobs]:
    return load(Knobs, argv, prefix="SSD_TEST", environ=environ)


def from_yaml(folder: Path, text: str, *argv: str, **environ: str) -> Loaded[Knobs]:
    file = folder / "settings.yaml"
    file.write_text(text)
    return knobs("--config", str(file), *argv, **environ)


def test_without_any_source_all_values_are_defaults() -> None:
    loaded = knobs()
    assert loaded.settings == Knobs()
    assert set(loaded.sources.values()) == {"default"}
    assert set(loaded.sources) == {"port", "http_port", "patience", "quiet", "name"} | {
        "dtype",
        "level",
        "split",
        "limit",
    }


def test_a_flag_beats_the_environment_which_beats_the_file_which_beats_the_default(
    tmp_path: Path,
) -> None:
    text = "port: 1\nhttp_port: 1\nname: file\n"
    environ = {"SSD_TEST_PORT": "2", "SSD_TEST_HTTP_PORT": "2"}
    loaded = from_yaml(tmp_path, text, "--port", "3", **environ)
    assert (loaded.settings.port, loaded.settings.http_port) == (3, 2)
    assert (loaded.settings.name, loaded.settings.level) == ("file", 1)
    assert loaded.sources["port"] == "flag --port"
    assert loaded.sources["http_port"] == "environment SSD_TEST_HTTP_PORT"
    assert loaded.sources["name"] == f"file {tmp_path / 'settings.yaml'}"
    assert loaded.sources["level"] == "default"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--patience", "2"], "patience", 2.0),
        (["--patience=0.25"], "patience", 0.25),
        (["--quiet"], "quiet", True),
        (["--no-quiet"], "quiet", False),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--level", "2"], "level", 2),
        (["--split", "4,3,2"], "split", (4, 3, 2)),
        (["--split", ""], "split", ()),
        (["--limit", "7"], "limit", 7),
        (["--limit", "none"], "limit", None),
        (["--name", "true"], "name", "true"),
    ],
)
def test_flags_become_values_of_their_fields_type(
    argv: list[str], name: str, value: object
) -> None:
    found = getattr(knobs(*argv).settings, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("word", ["true", "Yes", "1", "on"])
def test_a_boolean_of_the_environment_is_a_word(word: str) -> None:
    assert knobs(SSD_TEST_QUIET=word).settings.quiet is True


def test_a_file_brings_yamls_own_types(tmp_path: Path) -> None:
    text = "quiet: yes\nsplit: [3, 2]\npatience: 3\nlevel: 2\nlimit: null\n"
    settings = from_yaml(tmp_path, text).settings
    assert settings == Knobs(quiet=True, split=(3, 2), patience=3.0, level=2)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "# nothing\n").settings == Knobs()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prot", "5"], ["--prot", "did you mean --port"]),
        (["--htp-port=a-very-long-value-that-hides-the-name"], ["did you mean --http-port"]),
        (["--confg", "x"], ["did you mean --config"]),
        (["stray"], ["stray"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--port", "x1"], ["port", "flag --port", "'x1'", "whole number"]),
        (["--port", "70000"], ["port", "flag --port", "70000", "0..65535"]),
        (["--patience", "-1"], ["patience", "-1.0", "0.0..inf"]),
        (["--patience", "nan"], ["patience", "finite"]),
        (["--patience", "1e999"], ["patience", "finite"]),
        (["--dtype", "bfloat61"], ["dtype", "bfloat16, float32", "did you mean bfloat16"]),
        (["--split", "4,x"], ["split", "'x'", "whole number"]),
        (["--limit", "11"], ["limit", "11", "-inf..10"]),
        (["--http-port", "50051"], ["port and http_port are both 50051"]),
    ],
)
def test_a_bad_flag_is_an_error_that_says_what_was_found_and_what_is_allowed(
    argv: list[str], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        knobs(*argv)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_variable_of_the_prefix_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="SSD_TEST_PROT; did you mean SSD_TEST_PORT"):
        knobs(SSD_TEST_PROT="1")


def test_variables_of_other_prefixes_are_ignored() -> None:
    assert knobs(SSD_TESTING_PORT="1", PATH="/", SSD_PORT="1").settings == Knobs()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", ["settings.yaml", "did you mean port"]),
        ("port: 5.5", ["port", "settings.yaml", "5.5", "whole number"]),
        ("port: true", ["port", "True", "whole number"]),
        ("port:", ["port", "None"]),
        ("port: [1]", ["port", "whole number"]),
        ("quiet: maybe", ["quiet", "true or false"]),
        ("name: 3", ["name", "3", "TEXT"]),
        ("split: 3", ["split", "list"]),
        ("patience: .inf", ["patience", "finite"]),
        ("- port", ["mapping"]),
        ("port: [", ["not YAML"]),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        from_yaml(tmp_path, text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_or_binary_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml: No such file"):
        knobs("--config", str(tmp_path / "absent.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SettingsError, match=r"binary\.yaml: not YAML"):
        knobs("--config", str(tmp_path / "binary.yaml"))


def test_all_values_are_json_that_can_be_read_back_as_a_file(tmp_path: Path) -> None:
    loaded = knobs("--port", "7", "--split", "3,2", "--print-config", SSD_TEST_QUIET="on")
    assert loaded.is_only_shown
    printed = to_json(loaded.settings)
    assert json.loads(printed) | {"port": 7, "split": [3, 2], "quiet": True} == json.loads(printed)
    again = from_yaml(tmp_path, printed)
    assert again.settings == Knobs(port=7, split=(3, 2), quiet=True)
    assert not again.is_only_shown


@pytest.mark.parametrize(
    ("argv", "environ", "text"),
    [
        ((), {}, ""),
        ((), {"SSD_TEST_LOG_FILE": "/a"}, "/a"),
        (("--port", "no number", "--log-file", "/b"), {"SSD_TEST_LOG_FILE": "/a"}, "/b"),
        (("--log-file=/b", "--prot", "7"), {"SSD_TEST_NAEM": "x"}, "/b"),
        (("--log-file",), {}, ""),
    ],
)
def test_one_setting_can_be_found_among_others_that_are_wrong(
    argv: tuple[str, ...], environ: dict[str, str], text: str
) -> None:
    assert find_text("log_file", argv, prefix="SSD_TEST", environ=environ) == text


def test_help_shows_the_docstring_and_the_default_of_each_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        knobs("--help")
    assert left.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Port to listen on; 0 lets the system choose. (default: 50051)" in printed
    assert "50% of which nobody uses" in printed
    assert "--quiet, --no-quiet" in printed


def test_version_is_the_products(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        knobs("--version")
    assert capsys.readouterr().out == f"ssd {ssd.__version__}\n"


def test_a_class_without_source_has_no_help() -> None:
    assert field_help(type("Made", (), {"__module__": "nowhere"})) == {}


@pytest.mark.parametrize("cls", [TargetSettings, DraftSettings])
def test_every_knob_of_a_process_is_explained(cls: type[TargetSettings | DraftSettings]) -> None:
    assert set(cls.__dataclass_fields__) - set(field_help(cls)) == set()


@settings(max_examples=25)
@given(st.text(max_size=12))
def test_no_flag_value_raises_anything_but_a_settings_error(value: str) -> None:
    for name in ("port", "patience", "dtype", "level", "split", "limit"):
        with contextlib.suppress(SettingsError):
            knobs(f"--{name}={value}")

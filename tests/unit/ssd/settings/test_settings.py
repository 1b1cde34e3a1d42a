import contextlib
import json
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ssd
from ssd.errors import SettingsError
from ssd.settings import Loaded, field_help, find_text, load, nccl_log, to_json
from ssd_draft.settings import DraftSettings
from ssd_target.settings import TargetSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SomeSettings:
    """Settings of a test process."""

    port: int = field(default=50051, metadata={"min": 0, "max": 65535})
    """Port to listen on;
    with 0 the system selects one."""
    http_port: int = 9090
    wait_seconds: float = field(default=1.5, metadata={"min": 0.0})
    """Seconds, 50% of which are unused."""
    quiet: bool = False
    """Log less."""
    name: str = ""
    """Name of the model."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights."""
    level: Literal[1, 2] = 1
    """Log level."""
    split: tuple[int, ...] = ()
    """Numbers."""
    limit: int = field(default=0, metadata={"max": 10})
    """Maximum."""

    def __post_init__(self) -> None:
        if self.port and self.port == self.http_port:
            raise SettingsError(f"port and http_port are both {self.port}")


def load_some(*argv: str, **environ: str) -> Loaded[SomeSettings]:
    return load(SomeSettings, argv, prefix="SSD_TEST", environ=environ)


def from_yaml(folder: Path, text: str, *argv: str, **environ: str) -> Loaded[SomeSettings]:
    file = folder / "settings.yaml"
    file.write_text(text)
    return load_some("--config", str(file), *argv, **environ)


def test_without_any_source_all_values_are_defaults() -> None:
    loaded = load_some()
    assert loaded.settings == SomeSettings()
    assert not loaded.is_only_shown


def test_flags_precede_the_environment_the_file_and_the_defaults(tmp_path: Path) -> None:
    text = "port: 1\nhttp_port: 1\nname: file\n"
    environ = {"SSD_TEST_PORT": "2", "SSD_TEST_HTTP_PORT": "2"}
    loaded = from_yaml(tmp_path, text, "--port", "3", **environ)
    assert (loaded.settings.port, loaded.settings.http_port) == (3, 2)
    assert (loaded.settings.name, loaded.settings.level) == ("file", 1)


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--wait-seconds", "2"], "wait_seconds", 2.0),
        (["--wait-seconds=0.25"], "wait_seconds", 0.25),
        (["--quiet"], "quiet", True),
        (["--no-quiet"], "quiet", False),
        (["--dtype", "float32"], "dtype", "float32"),
        (["--level", "2"], "level", 2),
        (["--split", "4,3,2"], "split", (4, 3, 2)),
        (["--split", ""], "split", ()),
        (["--limit", "7"], "limit", 7),
        (["--name", "true"], "name", "true"),
    ],
)
def test_flags_are_converted_to_the_type_of_their_field(
    argv: list[str], name: str, value: object
) -> None:
    found = getattr(load_some(*argv).settings, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["a:1,b:2", " a:1, b:2 ", "a:1 ,\n b:2, "])
def test_a_list_has_no_blanks_around_its_parts(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("drafts: ['a:1', ' b:2 ']\n")
    for argv, environ in (
        (["--drafts", text], {}),
        ([], {"SSD_TARGET_DRAFTS": text}),
        (["--config", str(file)], {}),
    ):
        found = load(TargetSettings, argv, prefix="SSD_TARGET", environ=environ).settings
        assert found.drafts == ("a:1", "b:2")


@pytest.mark.parametrize("word", ["true", "Yes", "1", "on"])
def test_a_boolean_in_the_environment_is_a_word(word: str) -> None:
    assert load_some(SSD_TEST_QUIET=word).settings.quiet is True


def test_a_file_has_the_types_of_yaml(tmp_path: Path) -> None:
    text = "quiet: yes\nsplit: [3, 2]\nwait_seconds: 3\nlevel: 2\n"
    settings = from_yaml(tmp_path, text).settings
    assert settings == SomeSettings(quiet=True, split=(3, 2), wait_seconds=3.0, level=2)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert from_yaml(tmp_path, "# nothing\n").settings == SomeSettings()


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
        (["--wait-seconds", "-1"], ["wait_seconds", "-1.0", "0.0..inf"]),
        (["--wait-seconds", "nan"], ["wait_seconds", "finite"]),
        (["--wait-seconds", "1e999"], ["wait_seconds", "finite"]),
        (["--dtype", "bfloat61"], ["dtype", "bfloat16, float32", "did you mean bfloat16"]),
        (["--split", "4,x"], ["split", "'x'", "whole number"]),
        (["--limit", "11"], ["limit", "11", "-inf..10"]),
        (["--http-port", "50051"], ["port and http_port are both 50051"]),
    ],
)
def test_an_invalid_flag_is_an_error_with_the_found_and_the_allowed_value(
    argv: list[str], words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_some(*argv)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_variable_is_an_error_that_names_the_nearest_one() -> None:
    with pytest.raises(SettingsError, match="SSD_TEST_PROT; did you mean SSD_TEST_PORT"):
        load_some(SSD_TEST_PROT="1")


def test_a_common_prefix_makes_no_variable_the_nearest_one() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting SSD_TEST_CHANNEL$"):
        load_some(SSD_TEST_CHANNEL="grpc")


def test_variables_of_other_prefixes_are_ignored() -> None:
    assert load_some(SSD_TESTING_PORT="1", PATH="/", SSD_PORT="1").settings == SomeSettings()


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
        ("wait_seconds: .inf", ["wait_seconds", "finite"]),
        ("- port", ["mapping"]),
        ("port: [", ["not YAML"]),
    ],
)
def test_an_invalid_file_is_an_error_that_names_it(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(SettingsError) as caught:
        from_yaml(tmp_path, text)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_or_binary_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"absent\.yaml: No such file"):
        load_some("--config", str(tmp_path / "absent.yaml"))
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(SettingsError, match=r"binary\.yaml: not YAML"):
        load_some("--config", str(tmp_path / "binary.yaml"))


def test_printed_settings_can_be_read_as_a_file(tmp_path: Path) -> None:
    loaded = load_some("--port", "7", "--split", "3,2", "--print-config", SSD_TEST_QUIET="on")
    assert loaded.is_only_shown
    printed = to_json(loaded.settings)
    assert json.loads(printed) | {"port": 7, "split": [3, 2], "quiet": True} == json.loads(printed)
    again = from_yaml(tmp_path, printed)
    assert again.settings == SomeSettings(port=7, split=(3, 2), quiet=True)
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
def test_one_setting_can_be_read_while_others_are_invalid(
    argv: tuple[str, ...], environ: dict[str, str], text: str
) -> None:
    assert find_text("log_file", argv, prefix="SSD_TEST", environ=environ) == text


def test_help_shows_the_docstring_and_the_default_of_each_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as left:
        load_some("--help")
    assert left.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Port to listen on; with 0 the system selects one. (default: 50051)" in printed
    assert "50% of which are unused" in printed
    assert "--quiet, --no-quiet" in printed


def test_version_is_that_of_the_product(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_some("--version")
    assert capsys.readouterr().out == f"ssd {ssd.__version__}\n"


def test_the_log_of_nccl_is_known_if_the_environment_asks_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/tmp/nccl.%p")
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    assert nccl_log() is None
    monkeypatch.setenv("NCCL_DEBUG", "info")
    assert nccl_log() == Path(f"/tmp/nccl.{os.getpid()}")


def test_a_class_without_source_has_no_help() -> None:
    assert field_help(type("Made", (), {"__module__": "nowhere"})) == {}


@pytest.mark.parametrize("cls", [TargetSettings, DraftSettings])
def test_every_setting_of_a_process_has_a_description(cls: type) -> None:
    assert {each.name for each in fields(cls)} - field_help(cls).keys() == set()


@settings(max_examples=25)
@given(st.text(max_size=12))
def test_no_flag_value_raises_anything_but_a_settings_error(value: str) -> None:
    for name in ("port", "wait_seconds", "dtype", "level", "split", "limit"):
        with contextlib.suppress(SettingsError):
            load_some(f"--{name}={value}")

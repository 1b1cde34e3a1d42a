"""Models and errors of the benchmark's command line."""

import ast
import io
import json
import signal
import sys
from pathlib import Path

import pytest
import typer
from tests.unit.ssd_cli.fresh import fresh_python

from ssd import demo
from ssd.console import make_console, run_app
from ssd.errors import ModelNotFoundError
from ssd.testing.tiny_folder import write_tiny_folder
from ssd_bench import __main__, command, peers, sampling, serve
from ssd_bench.__main__ import main
from ssd_bench.command import numbers, only_writer, show_results, widened, words

WITH_RESULTS = pytest.mark.parametrize("words", [[], ["peers"], ["sampling"], ["serve"]])
"""The commands that measure into a folder."""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--widen-target", "3"], "--widen-target 3: choose one of 1, 2, 4, 8"),
        (["--widen-draft", "0"], "--widen-draft 0: choose one of 1, 2, 4, 8"),
        (["--batch", "x"], "--batch 'x': must be whole numbers, separated by commas"),
        (["--batch", "1.9"], "--batch '1.9': must be whole numbers, separated by commas"),
        (["peers", "--dtypes", "int8,int9"], "'int8,int9': choose of float32, bfloat16, int8"),
        (["peers", "--methods", "none,drfat"], "'none,drfat': choose of none, draft, ngram, ssd"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--deadline-ms", "nan"], "--deadline-ms is nan, must be in 0..60000"),
        (["--max-tokens", "5000"], "--max-tokens is 5000, must be in 16..1000"),
        (["--num-prompts", "9" * 30], "must be in 1..1000000"),
        (["--output", "A", "plots", "B"], "--output: write it after plots"),
        (["--json", "data"], "--json: write it after data"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--loads", "x"], "--loads 'x': choose of streams, prompts, overload, poisson"),
        (["serve", "--loads", "overload"], "--loads overload: give its --rate"),
    ],
)
def test_bad_usage_prints_one_line_with_the_program_name_and_exits_with_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv, "ssd bench") == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("error: ")
    assert message in output.err
    command = "ssd bench" if argv[0].startswith("--") else f"ssd bench {argv[0]}"
    assert output.err.endswith(f"(see: {command} --help)\n")


ENDED_MEASUREMENT = """
import pathlib, signal, sys, tempfile
from ssd_bench import __main__

tempfile.tempdir = sys.argv[1]
folder = pathlib.Path(tempfile.tempdir)

def measure(_):
    print(len(list(folder.glob("*/*/model.safetensors"))))
    signal.raise_signal(signal.SIGHUP)
    print("ignored")
    signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGHUP, signal.SIG_IGN)
__main__.run_plan = measure
print(__main__.main(["--widen-draft", "2", "--output", str(folder / "results")]))
print(len(list(folder.glob("*/*/model.safetensors"))))
"""


@pytest.mark.timeout(120)
def test_sigterm_ends_a_measurement_which_deletes_its_widened_models(tmp_path: Path) -> None:
    ended = fresh_python("-c", ENDED_MEASUREMENT, str(tmp_path))
    assert ended.stdout.split() == ["1", "ignored", str(128 + signal.SIGTERM), "0"]


def test_a_value_that_is_repeated_counts_once() -> None:
    assert numbers("8,1,8", "--batch", int, 1, 8) == (8, 1)
    assert words("ssd,none,ssd", "--methods", ["none", "ssd"]) == ["ssd", "none"]


@pytest.mark.timeout(120)
def test_a_wrong_path_is_refused_without_the_imports_that_measure(tmp_path: Path) -> None:
    code = "import sys; from ssd_bench.__main__ import main; main(); print(sorted(sys.modules))"
    ended = fresh_python("-c", code, "--target", str(tmp_path))
    assert ended.returncode == 0
    assert ended.stderr.startswith(f"error: --target {tmp_path}: no config.json in this folder")
    assert "torch" not in ast.literal_eval(ended.stdout)


@pytest.mark.timeout(120)
def test_the_command_starts_without_the_packages_of_its_extra() -> None:
    code = (
        "import sys; sys.modules |= dict.fromkeys(['matplotlib', 'transformers']); "
        "from ssd_bench.__main__ import main; sys.exit(main(['--help']))"
    )
    assert fresh_python("-c", code).returncode == 0


def test_a_plot_without_matplotlib_is_refused_before_a_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "ssd_bench.plots", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["peers"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: the plot needs matplotlib, which is not installed: run")
    assert error.count("\n") == 1


@WITH_RESULTS
def test_an_output_that_cannot_be_written_is_refused_before_a_measurement(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for module in (__main__, peers.command, sampling.command, serve):
        # What each command needs to measure.
        for name in ("run_plan", "load_tokenizer", "deployed", "interpreter"):
            monkeypatch.setattr(module, name, None, raising=False)
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "results"
    assert main([*words, "--output", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error == (
        f"error: --output: {folder} cannot be written (Not a directory): choose another folder\n"
    )


@WITH_RESULTS
def test_a_second_run_for_the_same_folder_is_refused_at_once(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with only_writer(tmp_path / "results"):
        assert main([*words, "--output", str(tmp_path / "results")]) == 2
    problem = f"error: --output: another run writes to {tmp_path / 'results'}: choose another"
    assert capsys.readouterr().err.startswith(problem)
    with only_writer(tmp_path / "results"):
        assert not list((tmp_path / "results").iterdir())


@pytest.mark.parametrize("word", ["data", "plots"])
def test_a_file_that_cannot_be_written_is_one_line(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text('{"records": [], "rounds": []}')
    folder = tmp_path / "file" / "results"
    files = [str(tmp_path / "file")] if word == "plots" else []
    argv = [word, *files, "--output", str(folder)]
    assert main(argv) == 1
    assert capsys.readouterr().err == f"error: {folder}: Not a directory\n"
    with pytest.raises(NotADirectoryError):
        main([*argv, "--debug"])


def test_json_has_no_escape_sequences_where_colours_are_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(command, "out", make_console())
    results = {"engine": "[red]é", "figures": [1.5, None, True]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    show_results(tmp_path / "results.json", "", is_json=True)
    shown = capsys.readouterr().out
    assert shown == json.dumps(results, indent=2) + "\n"
    assert json.loads(shown) == results


def test_brackets_of_a_table_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = "| data[code] | failed: OSError in [/usr/lib/libfoo.so] :smile: |"
    show_results(tmp_path / "[v2].json", table, is_json=False)
    shown = capsys.readouterr()
    assert shown.out == f"{table}\n"
    assert shown.err.startswith(f"written to {tmp_path}/[v2].json, [v2].md")


def test_results_are_written_and_printed_where_the_locale_is_ascii(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_text(path: Path, text: str, encoding: str = "ascii") -> None:
        path.write_bytes(text.encode(encoding))

    monkeypatch.setattr(Path, "write_text", write_text)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    app = typer.Typer()

    @app.command()
    def show() -> None:
        __main__.write({"records": [], "rounds": []}, "3 (2–4)", tmp_path)
        command.out.print("3 (2–4)")

    assert run_app(app, [], "ssd bench") == 0
    assert (tmp_path / "results.md").read_bytes() == "3 (2–4)".encode()
    sys.stdout.seek(0)
    assert sys.stdout.read() == "3 (2\\u20134)\n"


@pytest.mark.parametrize("flag", ["--target", "--draft"])
def test_a_name_of_no_model_is_refused_with_its_flag(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([flag, "/nope"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} /nope: there is no such folder")


def test_debug_shows_the_stack_trace(tmp_path: Path) -> None:
    assert main(["--target", str(tmp_path)]) == 2
    with pytest.raises(ModelNotFoundError):
        main(["--target", str(tmp_path), "--debug"])


@pytest.mark.parametrize("config", ["", "[]", '{"model_type": "gpt2"}'])
def test_a_model_that_cannot_run_is_refused_before_it_is_widened(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_folder(tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert main(["--target", str(tmp_path), "--widen-target", "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --target {tmp_path}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "damage"),
    [
        (
            "--target",
            ("config.json", b'ings": true', b'ings": false', ": tensor lm_head.weight is"),
        ),
        ("--draft", ("tokenizer.json", b"{", b"", "/tokenizer.json: not a tokenizer")),
    ],
)
@WITH_RESULTS
def test_a_damaged_model_is_refused_with_its_flag_before_a_measurement(
    words: list[str],
    damage: tuple[str, bytes, bytes, str],
    flag: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, old, new, problem = damage
    damaged = write_tiny_folder(tmp_path / "model") / file
    content = damaged.read_bytes()
    assert old in content
    damaged.write_bytes(content.replace(old, new, 1))
    output = tmp_path / "results"
    argv = [*words, flag, str(damaged.parent), "--output", str(output)]
    assert main([*argv, *(["--peers", "ssd", "--threads", "1"] if words == ["peers"] else [])]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag} {damaged.parent}{problem}")
    assert not output.exists()


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        (["serve", "--num-drafts", "0"], "--draft"),
        (["peers", "--peers", "ssd", "--methods", "none", "--threads", "1"], "--draft"),
        (["peers", "--peers", "openvino-genai", "--threads", "1"], "--draft"),
        (["peers", "--peers", "vllm", "--methods", "none", "--threads", "1"], "--target"),
    ],
)
def test_a_model_that_this_product_does_not_run_may_be_of_any_family(
    argv: list[str], flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_folder(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    with only_writer(tmp_path / "results"):
        words = [flag, str(tmp_path / "model"), "--output", str(tmp_path / "results")]
        assert main([*argv, *words]) == 2
    assert "another run writes to" in capsys.readouterr().err


def test_the_draft_beside_another_engine_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (write_tiny_folder(tmp_path) / "tokenizer.json").unlink()
    argv = ["peers", "--peers", "vllm", "--methods", "ssd", "--threads", "1"]
    assert main([*argv, "--draft", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --draft {tmp_path}: no tokenizer.json")


@pytest.mark.parametrize("name", ["demo://target?widen=2", "hf://org/name"])
def test_wider_demo_models_and_models_on_the_hub_are_not_refused(name: str) -> None:
    command.check_models(target=name, draft=name)


def test_a_wider_demo_model_is_measured_at_its_own_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def width(folder: Path) -> int:
        return int(json.loads((folder / "config.json").read_text())["hidden_size"])

    plain = width(demo.folder("draft"))
    assert width(widened("demo://draft", 1, tmp_path)) == plain
    assert width(widened("demo://draft?widen=2", 1, tmp_path)) == 2 * plain
    assert width(widened("demo://draft?widen=2", 2, tmp_path)) == 4 * plain

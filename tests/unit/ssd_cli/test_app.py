"""Errors and output of the command that need no running process."""

import ast
import io
import json
import re
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.ssd_cli.fresh import fresh_python

import ssd
from ssd.errors import IncompleteTextError, NotReadyError
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.testing.tiny_folder import write_tiny_folder
from ssd.types import GenerationChunk
from ssd_cli import app, display
from ssd_cli.app import run
from ssd_cli.figures import Collector


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["genrate"], ""),
        (["generate"], ""),
        (["generate", "x", "--temperature", "9"], "--temperature is 9, must be in 0..2 (see: "),
        (["generate", "x", "--temperature", "nan"], "--temperature is nan, must be in 0..2"),
        (["generate", "x", "--max-tokens", "0"], ""),
        (["generate", "x", "--max-tokens", "9" * 20], ""),
        (["generate", "x", "--top-k", "-5"], "--top-k is -5, must be in 0..2147483647"),
        (
            ["generate", "x", "--stop-token-id", "-1"],
            "--stop-token-id value 1 is -1, must be in 0..",
        ),
        (["demo", "--seed", str(2**64)], ""),
        (["generate", "x", "--dtype", "float99"], ""),
        (["generate", "x", "--mode", "fast"], "--mode: 'fast' is not one of 'auto'"),
        (["generate", "x", "--mode", "speculative", "--num-drafts", "0"], ""),
        (["up", "--mode", "speculative", "--num-drafts", "0"], ""),
        (["generate", "x", "--mode", "synchronous", "--draft", "/no/such/model"], ""),
        (["up", "--mode", "synchronous", "--draft", "/no/such/model"], ""),
        (["generate", "x", "--endpoint", ""], ""),
        (["generate", "x", "--endpoint", "http://127.0.0.1:50051"], ""),
        (["generate", "x", "--endpoint", "localhost"], ""),
        (["generate", "x", "--endpoint", "localhost:0"], ""),
        (["generate", "x", "--endpoint", "localhost:65536"], ""),
        (
            ["generate", "x", "--wait", "3"],
            "--wait is for a running target; name it with --endpoint",
        ),
        (["generate", "x", "--stop", ""], "--stop value 1 has 0 characters, must have 1..256"),
        (["generate", "x", "--top-p", "1.5"], "--top-p is 1.5, must be in 0..1"),
        (["generate", "x", "--min-p", "-1e-50"], "--min-p is -1e-50, must be in 0..1"),
        (["generate", "x", "--n", "9"], "--n is 9, must be in 1..8"),
        (["generate", "x", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", "x", "--json-schema", "/no/such/file"], ""),
        (["generate", "x", "--logit-bias", "5"], "--logit-bias '5' is not ID=BIAS"),
        (["generate", "x", "--logit-bias", "-5=1"], "--logit-bias '-5=1' is not ID=BIAS"),
        (["generate", "x", "--logit-bias", "5=101"], "--logit-bias 5 is 101, must be in -100..100"),
        (["generate", "x", "--priority", "101"], "--priority is 101, must be in -100..100"),
        (["generate", "-x"], "No such option: -x; write -- before an argument that begins with -"),
        (["generate", "x", "--top_k", "3"], "No such option: --top_k; did you mean --top-k? (see"),
        (["check", "--mode", "auto"], "No such option: --mode (see: "),
        (
            ["up", "--port", "7001", "--http-port", "7000"],
            "--port 7001 and --http-port 7000 overlap: target and drafts use the ports 7001..7002",
        ),
        *(
            (
                ["up", "--gateway", "--gateway-port", port],
                f"{flag} and --gateway-port {port} overlap: target and drafts use the ports",
            )
            for flag, port in (
                ("--port 50051", "50051"),
                ("--port 50051", "50052"),
                ("--http-port 9090", "9091"),
            )
        ),
        (["up", "--gateway-port", "8123"], "--gateway-port needs --gateway (see: "),
        (["up", "--lookahead", "0"], ""),
        (["up", "--lookahead", "99"], "--lookahead is 99, must be in 1..16"),
        (["up", "--port", "x"], "--port is 'x', must be a whole number in 0..65000"),
        (["models", "/nope"], "folders: '/nope' does not exist; it must be a folder"),
        (["up", "--colour"], ""),
        (["up", "--device", "gpu"], "--device is 'gpu', must be cpu, cuda or cuda:NUMBER (see: "),
        (["generate", "x", "--draft-device", "cpu:0"], "--draft-device is 'cpu:0', must be cpu,"),
        (["chat", "--temperature", "nan"], ""),
        (["chat", "--endpoint", "localhost:1", "--num-drafts", "2"], ""),
        (["chat", "--target", "/no/such/model"], ""),
        (["pool", "--endpoint", "localhost"], ""),
    ],
)
def test_bad_usage_prints_one_line_with_a_hint_and_exits_with_2(
    argv: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith(f"error: {problem}")
    assert "--help)" in output.err


def test_a_prompt_after_two_dashes_can_begin_with_a_dash(interrupted: list[GenerateCall]) -> None:
    assert run(["generate", "--endpoint", "127.0.0.1:1", "--", "-x"]) == 130
    assert [call.prompt for call in interrupted] == ["-x"]


@pytest.mark.parametrize("command", [["generate", "x"], ["up"], ["demo"]])
@pytest.mark.parametrize("flag", ["--target", "--draft"])
@pytest.mark.parametrize(
    ("model", "problem"),
    [("/no/such/folder", "there is no such folder"), ("demo://other", "not in the embedded pair")],
)
def test_a_wrong_model_is_refused_before_a_process_starts(
    command: list[str],
    flag: str,
    model: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(app, command[0], None)
    assert run([*command, flag, model]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"error: {flag} ")
    assert model in error
    assert problem in error


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("pytorch_model.bin", "pytorch_model.bin: pickled weights are not read"),
        ("m.gguf", "m.gguf: GGUF is not supported"),
        ("notes.txt", "no .safetensors file in this folder"),
    ],
)
def test_a_model_without_safetensors_is_refused_before_a_process_starts(
    file: str,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(app, "generate", None)
    weights = write_tiny_folder(tmp_path) / "model.safetensors"
    weights.rename(tmp_path / file)
    assert run(["generate", "x", "--draft", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --draft {tmp_path}: {problem}")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 3'),
        ("tokenizer.json", "{", ""),
    ],
)
def test_a_damaged_model_is_refused_before_a_process_starts(
    file: str, old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny_folder(tmp_path)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "generate", None)
        assert run(["generate", "x", "--target", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --target {tmp_path}")


@pytest.mark.parametrize(
    "argv", [["up"], ["up", "--target", "m"], ["generate", "x"], ["demo"], ["bench"]]
)
def test_a_deleted_folder_is_reported_before_a_process_starts(
    argv: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(app, argv[0], None, raising=False)
    monkeypatch.setattr("os.execv", None)
    folder = tmp_path / "deleted"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert run(argv) == 2
    wanted = "error: the current folder no longer exists: change to another one\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize("command", [["generate", "x"], ["up"]])
def test_ranks_that_do_not_divide_the_target_are_refused_before_a_process_starts(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, command[0], None)
    for size, problem in (("8", "does not divide the 6 attention heads"), ("3", "allows 1, 2")):
        assert run([*command, "--tensor-parallel-size", size]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: --target demo://target: tensor_parallel_size {size}: ")
        assert problem in error


@pytest.mark.usefixtures("interrupted")
def test_a_draft_larger_than_its_target_is_a_warning_with_the_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = ["--target", "demo://draft", "--draft", "demo://target"]
    assert run(["generate", "x", *pair]) == 130
    warnings = [each for each in capsys.readouterr().err.splitlines() if "parameters" in each]
    assert warnings == [
        "warning: the draft has 14.2M parameters and the target 1.0M: a draft should be smaller; "
        "are --target and --draft exchanged?"
    ]
    assert run(["generate", "x"]) == 130
    assert "parameters" not in capsys.readouterr().err


@pytest.mark.usefixtures("interrupted")
def test_the_model_of_a_draft_that_is_not_started_is_not_checked() -> None:
    assert run(["generate", "x", "--num-drafts", "0", "--draft", "/no/such/folder"]) == 130


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_unreachable_endpoint_prints_one_line_and_exits_with_1(
    form: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", "--wait", "0", *form]) == 1
    output = capsys.readouterr()
    assert output.out == "", "there is no object either"
    assert output.err.count("\n") == 1
    assert output.err.startswith("error: 127.0.0.1:1 cannot be reached: Connection refused (")
    assert "ssd up" in output.err


def test_generate_waits_for_a_target_and_prints_the_cause(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", "--wait", "1"]) == 1
    waiting, error = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting: 127.0.0.1:1 cannot be reached")
    assert waiting.endswith("waiting at most 1 s")
    assert error.startswith("error: 127.0.0.1:1 cannot be reached")


@pytest.mark.parametrize(
    "argv",
    [
        ["--debug", "generate", "x", "--endpoint", "127.0.0.1:1", "--wait", "0"],
        ["generate", "x", "--endpoint", "127.0.0.1:1", "--wait", "0", "--debug"],
    ],
)
def test_debug_shows_the_stack_trace_at_any_position_and_for_one_command(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotReadyError):
        run(argv)
    assert run([word for word in argv if word != "--debug"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("command", ["generate", "up", "demo", "models"])
def test_commands_that_start_processes_document_debug(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    assert "--debug" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--target", "demo://target"],
        ["--draft", "/no/such/folder"],
        ["--num-drafts", "2", "--dtype", "float32", "--lookahead", "3", "--branches", "8"],
    ],
)
def test_flags_of_a_deployment_cannot_be_combined_with_an_endpoint(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", *flags]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert all(word in output.err for word in ("--endpoint", *flags[::2]))


@pytest.mark.parametrize(
    ("prompt", "problem"), [("\udcff", "the prompt is not UTF-8"), ("", "the prompt is empty")]
)
def test_an_invalid_prompt_is_refused_before_a_process_starts(
    prompt: str, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "generate", None)
    monkeypatch.setattr(sys, "stdin", io.StringIO(prompt))
    for given in (prompt, "-"):
        assert run(["generate", given]) == 2
        assert problem in capsys.readouterr().err


def test_standard_input_that_is_not_utf8_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "generate", None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert run(["generate", "-"]) == 2
    assert "the prompt is not UTF-8" in capsys.readouterr().err


@pytest.mark.timeout(120)
def test_a_missing_standard_input_is_empty() -> None:
    code = "import sys; sys.stdin = None; from ssd_cli.app import run; sys.exit(run())"
    ended = fresh_python("-c", code, "generate", "-")
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the prompt is empty")


def test_characters_that_the_output_lacks_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(*_others: object) -> str:
        display.write("日本\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "generate", generate)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1"]) == 130
    sys.stdout.seek(0)
    assert sys.stdout.read() == "\\u65e5\\u672c\n"


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_ctrl_c_shows_the_statistics_of_what_was_generated(
    form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def generate(_options: object, _call: object, collector: Collector) -> None:
        collector.start()
        collector.add(GenerationChunk(token_ids=(4, 5), text="de", seed=3))
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "generate", generate)
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", *form]) == 130
    shown = capsys.readouterr()
    if form:
        found = json.loads(shown.out)
        assert (found["text"], found["finish_reason"]) == ("de", "cancelled")
        assert found["statistics"]["tokens"] == 2
        assert None not in found["statistics"].values()
        assert "mode" not in found["statistics"]
    else:
        assert re.search(r"^tokens +2$", shown.err, re.MULTILINE)


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_error_after_the_first_token_prints_the_partial_text(
    form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def generate(*_arguments: object) -> AsyncIterator[GenerationChunk]:
        yield GenerationChunk(token_ids=(4, 5), text="de", seed=3)
        raise IncompleteTextError("the connection was lost after 2 tokens")

    monkeypatch.setattr(TargetClient, "generate", generate)
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", *form]) == 1
    shown = capsys.readouterr()
    assert shown.err == "error: the connection was lost after 2 tokens\n"
    if form:
        found = json.loads(shown.out)
        assert (found["text"], found["token_ids"]) == ("de", [4, 5])
        assert found["finish_reason"] == "failed"
        assert found["error"] == "the connection was lost after 2 tokens"
    else:
        assert shown.out == "de\n"


@pytest.mark.usefixtures("interrupted")
def test_ctrl_c_before_the_first_token_reports_that_nothing_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1"]) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "cancelled: no token arrived, so there are no statistics\n"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (OSError(28, "No space left on device"), "the output cannot be written"),
        (PermissionError(13, "Permission denied", "model/x"), "model/x"),
    ],
)
def test_an_error_of_the_system_names_its_file(
    error: OSError,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr(app, "app", fail)
    monkeypatch.setattr("os.dup2", lambda *_: None)
    assert run(["models"]) == 1
    assert f"error: {what}: {error.strerror}" in capfd.readouterr().err


def test_version_prints_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{ssd.__version__}\n"


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in ("generate", "up", "demo", "models", "bench"))


def test_models_with_json_prints_one_array(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    assert run(["models", str(tmp_path), "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    assert {model["name"] for model in models} >= {"demo://target", "demo://draft", str(folder)}
    assert {model["dtype"] for model in models} < {"bfloat16", "float32"}
    assert all(model["dtype_reason"] for model in models)


def test_up_names_all_ports_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
        ports = [each.getsockname()[1] for each in (one, two)]
        flags = ("--port", str(ports[0]), "--http-port", str(ports[1]))
        assert run(["up", "--mode", "autoregressive", *flags]) == 1
    assert capsys.readouterr().err.startswith(
        f"error: ports in use: {ports[0]} (gRPC, target), {ports[1]} (HTTP, target); choose another"
    )


INTERRUPTED_IMPORT = """
import sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "ssd_cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
import ssd_cli.__main__
"""


@pytest.mark.timeout(120)
def test_ctrl_c_during_the_import_prints_no_stack_trace() -> None:
    ended = fresh_python("-c", INTERRUPTED_IMPORT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.timeout(120)
def test_the_command_imports_no_slow_library() -> None:
    output = fresh_python("-c", "import sys, ssd_cli.app; print(sorted(sys.modules))")
    loaded = set(ast.literal_eval(output.stdout))
    assert "ssd_cli.app" in loaded
    assert loaded & {"torch", "transformers", "tokenizers", "numpy", "jinja2", "httpx"} == set()


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--token-file", "t"], "--token-file is for a running target; name it with --endpoint"),
        (["--endpoint", "a:1", "--token-file", "/no/file"], "/no/file: No such file"),
        (["--endpoint", "a:1", "--tls-certificate", "c"], "give the file of the servers' CA too"),
        (["--endpoint", "a:1", "--token-file", "token"], "the token would be sent to a:1 in plain"),
        (["--allow-insecure"], "--allow-insecure is for a running target"),
    ],
)
def test_credentials_are_checked_before_a_call(
    argv: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("token-of-a-client")
    assert run(["generate", "x", *argv]) == 2
    assert problem in capsys.readouterr().err

"""``ssd generate``: its request and its output, without a process."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ssd.errors import FieldError
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.types import FinishReason, GenerationChunk, Mode, SamplingParams, SpeculationStatistics
from ssd_cli import app
from ssd_cli.app import run
from ssd_cli.figures import Collector
from ssd_cli.sampling_options import flag_problem


def test_flags_are_the_sampling_parameters_of_the_request(
    interrupted: list[GenerateCall], tmp_path: Path
) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}\n')
    flags = "--top-k 5 --top-p 0.5 --min-p 0.25 --repetition-penalty 1.5 --presence-penalty 0.5"
    flags += " --frequency-penalty -0.5 --min-tokens 2 --ignore-eos --n 2 --stop x --json"
    flags += f" --logprobs 3 --json-schema {schema} --echo --priority -7 --stop-token-id 4"
    flags += " --logit-bias 9=1.5 --logit-bias 3=-100"
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", *flags.split()]) == 130
    (call,) = interrupted
    assert call.sampling == SamplingParams(
        temperature=1.0,
        top_k=5,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        min_tokens=2,
        ignore_eos=True,
        stop=("x",),
        json_schema='{"type": "object"}',
        n=2,
        logprobs=3,
        echo=True,
        stop_token_ids=(4,),
        logit_bias=((3, -100.0), (9, 1.5)),
        max_tokens=128,
    )
    assert call.priority == -7


def test_a_parameter_that_the_target_refuses_is_named_by_its_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def generate(*_arguments: object) -> None:
        raise FieldError("sampling.regex", "cannot be used: unclosed group")

    monkeypatch.setattr(app, "generate", generate)
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", "--regex", "("]) == 2
    assert capsys.readouterr().err == "error: --regex cannot be used: unclosed group\n"


@pytest.mark.parametrize(
    ("field", "shown"),
    [
        ("text", "the prompt has 9 bytes"),
        ("chat", "the conversation has 9 bytes"),
        ("sampling.stop[1]", "--stop value 2 has 9 bytes"),
        ("sampling.logit_bias[7]", "--logit-bias 7 has 9 bytes"),
        ("chat.messages", "chat.messages: has 9 bytes"),
    ],
)
def test_an_error_names_what_the_user_typed(field: str, shown: str) -> None:
    assert flag_problem(FieldError(field, "has 9 bytes")) == shown


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_all_continuations_are_printed(
    form: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statistics = SpeculationStatistics(mode=Mode.AUTO, rounds=1)

    async def generate(*_arguments: object) -> AsyncIterator[GenerationChunk]:
        for choice, text in enumerate(("ab", "cd")):
            yield GenerationChunk(token_ids=(choice,), text=text, choice=choice)
            yield GenerationChunk(
                token_ids=(), choice=choice, finish_reason=FinishReason.STOP, statistics=statistics
            )

    monkeypatch.setattr(TargetClient, "generate", generate)
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", "--n", "2", *form]) == 0
    shown = capsys.readouterr().out
    if form:
        found = json.loads(shown)
        assert (found["text"], found["choices"][0]["text"]) == ("ab", "cd")
    else:
        assert shown == "ab\n\n--- 2 of 2 ---\ncd\n"


@pytest.mark.parametrize(
    ("mode", "ran", "shown"),
    [
        ("speculative", Mode.AUTOREGRESSIVE, "speculative (no table used)"),
        ("synchronous", Mode.AUTOREGRESSIVE, "synchronous (no proposal used)"),
        ("speculative", Mode.SPECULATIVE, "speculative"),
        ("auto", Mode.AUTOREGRESSIVE, "autoregressive"),
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_requested_mode_is_shown_also_if_a_short_text_did_not_use_it(
    mode: str,
    ran: Mode,
    shown: str,
    form: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def generate(_options: object, _call: object, collector: Collector) -> str:
        collector.start()
        statistics = SpeculationStatistics(mode=ran, rounds=1)
        collector.add(
            GenerationChunk(
                token_ids=(3,), text="a", finish_reason=FinishReason.LENGTH, statistics=statistics
            )
        )
        return ""

    monkeypatch.setattr(app, "generate", generate)
    assert run(["generate", "x", "--endpoint", "127.0.0.1:1", "--mode", mode, *form]) == 0
    output = capsys.readouterr()
    if form:
        assert json.loads(output.out)["statistics"]["mode"] == ran
    else:
        (line,) = [each for each in output.err.splitlines() if each.startswith("mode")]
        assert line.removeprefix("mode").strip() == shown


def test_the_echoed_prompt_is_printed_and_not_counted() -> None:
    collector = Collector(is_echo=True)
    collector.start()
    statistics = SpeculationStatistics(mode=Mode.AUTO, rounds=1)
    for choice in (0, 1):
        collector.add(GenerationChunk(token_ids=(7, 8), text="def ", choice=choice, seed=3))
        collector.add(
            GenerationChunk(
                token_ids=(9,),
                text="f",
                choice=choice,
                finish_reason=FinishReason.STOP,
                statistics=statistics,
            )
        )
    found = collector.finish()
    for each in (found, *found.others):
        assert (each.text, each.token_ids) == ("def f", (9,))
        assert each.figures.tokens == 1
    assert found.figures.seed == 3

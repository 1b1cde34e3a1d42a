"""The flags of ``ssd generate`` that select tokens. The bounds are those of requests."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from ssd.errors import FieldError, SSDError
from ssd.rpc.codec import MAX_PRIORITY
from ssd.rpc.sampling_codec import sampling_message, sampling_params
from ssd.types import SamplingParams
from ssd_cli.options import Temperature

Priority = Annotated[
    int,
    typer.Option(
        min=-MAX_PRIORITY, max=MAX_PRIORITY, help="Requests with higher values run earlier."
    ),
]
_SAMPLING = "sampling."
"""Beginning of the fields of a request that have flags here."""
_INPUTS = {"text": "the prompt", "chat": "the conversation", "input": ""}
"""Fields of a request that are no flags, and their names before a description that has none."""


def schema_text(file: Path | None, regex: str) -> str:
    """Return the content of the file of ``--json-schema``, empty without one.

    Raises:
        typer.BadParameter: it is not UTF-8, or there is a regular expression too.
    """
    if file is None:
        return ""
    if regex:
        raise typer.BadParameter("--json-schema and --regex exclude each other")
    try:
        return file.read_text(encoding="utf-8").strip() or " "
    except UnicodeDecodeError:
        raise typer.BadParameter(f"--json-schema {file} is not UTF-8") from None


def logit_biases(entries: list[str] | None) -> tuple[tuple[int, float], ...]:
    """Return the biases of ``--logit-bias``, by token id.

    Raises:
        typer.BadParameter: an entry is not ``ID=BIAS``, or an id has several.
    """
    biases: dict[int, float] = {}
    for entry in entries or ():
        token_id, _, bias = entry.partition("=")
        try:
            number = int(token_id)
            is_new = number >= 0 and number not in biases
            biases[number] = float(bias)
        except ValueError:
            is_new = False
        if not is_new:
            raise typer.BadParameter(
                f"--logit-bias {entry!r} is not ID=BIAS with a new token id, for example 5=-100"
            )
    return tuple(sorted(biases.items()))


def flag_problem(error: SSDError) -> str:
    """Return the message of an error, with what a user typed instead of a field of a request."""
    if not isinstance(error, FieldError):
        return str(error)
    if error.field in _INPUTS:
        return f"{_INPUTS[error.field]} {error.description}".lstrip()
    if not error.field.startswith(_SAMPLING):
        return str(error)
    name, bracket, entry = error.field.removeprefix(_SAMPLING).partition("[")
    flag = name.replace("_ids", "_id").replace("_", "-")
    place = entry.removesuffix("]")
    if bracket and name != "logit_bias":
        # The entry of a bias is its token id, and that of a list a place.
        place = f"value {int(place) + 1}"
    return " ".join(filter(None, (f"--{flag}", place, error.description)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are selected."""

    temperature: Temperature = 1.0
    top_k: Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")] = 0
    top_p: Annotated[
        float, typer.Option(help="Keep the most likely tokens with this probability together.")
    ] = 1.0
    min_p: Annotated[
        float, typer.Option(help="Keep tokens with this fraction of the highest probability.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Over 1: tokens of the prompt and the text become less likely.")
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(help="Over 0: tokens of the new text become less likely, once.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="Over 0: tokens of the new text become less likely, each time.")
    ] = 0.0
    min_tokens: Annotated[
        int, typer.Option(help="Number of new tokens before the model may end the text.")
    ] = 0
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the end of text.")
    ] = False
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; can be repeated.")
    ] = None
    stop_token_id: Annotated[
        list[int] | None,
        typer.Option(help="Stop before the text of this token id; can be repeated."),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=BIAS", help="Add to the logit of a token id, -100..100; can be repeated."
        ),
    ] = None
    json_schema: Annotated[
        Path | None,
        typer.Option(
            help="File with a JSON schema that the text follows.", exists=True, dir_okay=False
        ),
    ] = None
    regex: Annotated[str, typer.Option(help="Regular expression that the text matches.")] = ""
    n: Annotated[int, typer.Option("--n", help="Number of continuations, 1..8.")] = 1
    echo: Annotated[bool, typer.Option("--echo", help="Print the prompt before the text.")] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="With --json: log-probabilities of each token and of this many most likely ones."
        ),
    ] = None

    def params(self, *, seed: int | None, max_tokens: int | None) -> SamplingParams:
        """Return the parameters of a request.

        Raises:
            typer.BadParameter: one is out of its bounds; names the flag.
        """
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("stop", "stop_token_id", "logit_bias", "json_schema"):
            del plain[name]
        sampling = SamplingParams(
            **plain,
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            logit_bias=logit_biases(self.logit_bias),
            json_schema=schema_text(self.json_schema, self.regex),
            seed=seed,
            max_tokens=max_tokens,
        )
        try:
            return sampling_params(sampling_message(sampling))
        except FieldError as error:
            raise typer.BadParameter(flag_problem(error)) from None
        except ValueError as error:
            raise typer.BadParameter(f"a flag cannot be sent: {error}") from None

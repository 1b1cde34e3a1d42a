"""``ssd chat``: a conversation with a running target or with a temporary one.

Ctrl-C stops the answer, and at the prompt it clears the line. Ctrl-D at the prompt, or the end of
the input, ends the program. Lines that begin with / are commands, except with //.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import get_args

from ssd.errors import ContextLengthError, SSDError
from ssd.rpc.bounds import MAX_TEMPERATURE
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import Conversation, GenerateCall
from ssd.rpc.sampling_codec import SEEDS
from ssd.tasks import beside
from ssd.types import ChatTurn, Mode, SamplingParams
from ssd_cli.display import err, metrics_line, print_table, report, summary, write
from ssd_cli.figures import Collector, Figures, Generation, beside_request
from ssd_cli.generate import GenerateOptions, connected, stream
from ssd_cli.line_input import LineInput
from ssd_cli.options import Modes
from ssd_cli.sampling_options import flag_problem

HELP = """\
/mode auto|autoregressive|synchronous|speculative   how rounds run
/temperature 0..2                                    0 is greedy
/seed NUMBER|random                                  seed of each answer
/stats                                               figures of the last two answers
/reset                                               begin a new conversation
/help                                                this list
//TEXT                                               sends /TEXT as a message
Ctrl-C stops an answer; Ctrl-D at the prompt ends the program."""


class CommandError(SSDError):
    """A line that begins with / and is no command, or whose value is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Parameters of the next answer."""

    mode: Mode = Mode.AUTO
    temperature: float = 1.0
    seed: int | None = None
    """None: the target draws one for each answer."""
    max_tokens: int = 512

    def changed(self, name: str, value: str) -> "ChatSettings":
        """Return the settings after the command ``/name value``.

        Raises:
            CommandError: there is no such setting, or the value is wrong.
        """
        match name:
            case "mode":
                if value not in get_args(Modes):
                    raise CommandError(
                        f"/mode is {value!r}, must be one of {', '.join(get_args(Modes))}"
                    )
                return replace(self, mode=Mode(value))
            case "temperature":
                return replace(self, temperature=_number(name, value, MAX_TEMPERATURE))
            case "seed" if value == "random":
                return replace(self, seed=None)
            case "seed":
                low, high = SEEDS
                with contextlib.suppress(ValueError):
                    if low <= (seed := int(value)) <= high:
                        return replace(self, seed=seed)
                raise CommandError(
                    f"/seed is {value!r}, must be a whole number in {low}..{high}, or random"
                )
        raise CommandError(f"there is no command /{name}; /help lists them")

    def __str__(self) -> str:
        seed = "random" if self.seed is None else self.seed
        return f"mode {self.mode}, temperature {self.temperature:g}, seed {seed}"


@dataclass(slots=True)
class Chat:
    """One conversation: its turns, its settings and the figures of its answers."""

    client: TargetClient
    settings: ChatSettings
    on_text: Callable[[str], None]
    """Receives each new piece of text."""
    shows_metrics: bool
    turns: list[ChatTurn] = field(default_factory=list)
    last: list[Figures] = field(default_factory=list)
    """Figures of the last two answers."""
    num_errors: int = 0

    async def handle(self, line: str) -> None:
        """Run a command, or answer a message. Errors are reported; they do not end the chat.

        Cancelling it stops the answer. The conversation keeps the text so far.
        """
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._run_command(*line[1:].split())
            elif line:
                await self._answer(line[1:] if line.startswith("//") else line)
        except SSDError as error:
            self.num_errors += 1
            is_full = isinstance(error, ContextLengthError) and self.turns
            remedy = "; /reset begins a new conversation" if is_full else ""
            report("error", f"{flag_problem(error)}{remedy}", "red")

    def _run_command(self, name: str = "", *values: str) -> None:
        match name:
            case "help":
                err.print(HELP)
            case "reset":
                self.turns.clear()
                report("reset", "a new conversation begins")
            case "stats":
                self._show_stats()
            case _:
                self.settings = self.settings.changed(name, " ".join(values))
                report("set", str(self.settings))

    def _show_stats(self) -> None:
        if not self.last:
            raise CommandError("there is no answer yet")
        titles = ("before", "last")[-len(self.last) :]
        print_table(err, summary(list(zip(titles, self.last, strict=True)), shows_seed=True))

    async def _answer(self, message: str) -> None:
        turn, settings = ChatTurn("user", message), self.settings
        call = GenerateCall(
            prompt=Conversation((*self.turns, turn)),
            sampling=SamplingParams(
                temperature=settings.temperature, seed=settings.seed, max_tokens=settings.max_tokens
            ),
            mode=settings.mode,
        )
        collector = Collector()
        try:
            await stream(self.client, call, collector, self.on_text)
        except (SSDError, asyncio.CancelledError):
            if collector.token_ids:
                self._keep(turn, collector.partial())
            raise
        self._keep(turn, collector.finish())

    def _keep(self, turn: ChatTurn, answer: Generation) -> None:
        self.on_text("\n")
        self.turns += (turn, ChatTurn("assistant", answer.text))
        figures = beside_request(answer.figures, self.settings.mode)
        self.last = [*self.last[-1:], figures]
        if self.shows_metrics:
            err.print(metrics_line(figures), style="dim")


async def chat(
    options: GenerateOptions, settings: ChatSettings, lines: LineInput, *, shows_metrics: bool
) -> int:
    """Answer the lines of the user until their end; return the exit code.

    Returns:
        0, or 1 if lines that were not typed at a terminal had an error.

    Raises:
        SSDError: the processes cannot start.
    """
    async with connected(options) as client:
        info = await client.model_info()
        if lines.is_terminal:
            drafts = f"{info.active_drafts} draft(s)"
            err.print(f"{info.model} on {info.device}, {drafts}; {settings}. /help")
        conversation = Chat(client, settings, write, shows_metrics)
        while (line := await lines.read()) is not None:
            await _until_interrupted(conversation, line.strip())
    return 1 if conversation.num_errors and not lines.is_terminal else 0


async def _until_interrupted(conversation: Chat, line: str) -> None:
    """Handle a line; SIGINT stops only its answer."""
    loop = asyncio.get_running_loop()
    async with beside(conversation.handle(line)) as (work,):
        loop.add_signal_handler(signal.SIGINT, work.cancel)
        try:
            await asyncio.wait({work})
        finally:
            loop.remove_signal_handler(signal.SIGINT)
    if work.cancelled():
        report("stopped", "the answer is incomplete")
    else:
        work.result()


def _number(name: str, value: str, high: float) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 <= (number := float(value)) <= high:
            return number
    raise CommandError(f"/{name} is {value!r}, must be a number in 0..{high:g}")

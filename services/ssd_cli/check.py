"""``ssd check``: whether this machine generates the same texts with and without speculation."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.text import Text

from ssd.demo.corpus import held_out_prompts
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.runtime.launch import Deployment
from ssd.types import Mode, SamplingParams, TokenId
from ssd_cli.demo import DifferentTextError, NotSpeculativeError, first_difference
from ssd_cli.display import err, out, status, write
from ssd_cli.generate import GenerateOptions, connected

PROMPT_CHARS = 360
"""About 96 tokens of the embedded tokenizer."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What the comparison found."""

    num_texts: int
    num_tokens: int
    """Tokens of each text."""
    dtype: str
    """Data type of the target, with the format of its weights."""
    accepted_tokens: int
    """Proposed tokens that the target accepted, of all texts."""
    first_differences: tuple[int | None, ...]
    """Index of the first token that differs, by text; None for equal texts."""

    @property
    def num_equal(self) -> int:
        """Number of texts that are equal."""
        return sum(index is None for index in self.first_differences)


async def check(deployment: Deployment, batch: int, max_tokens: int, *, is_json: bool) -> None:
    """Generate the texts in both modes and print the result.

    Raises:
        SetupError: the processes cannot start.
        DifferentTextError: a text differs.
    """
    async with connected(GenerateOptions(deployment=deployment, is_quiet=is_json)) as client:
        info = await client.model_info()
        err.print(
            f"{batch} texts of {max_tokens} tokens, plain and speculative: "
            f"{info.num_parameters / 1e6:.0f}M parameters, {info.dtype}"
        )
        calls = _calls(batch, max_tokens)
        with status("plain decoding"):
            plain = await _texts(client, calls, Mode.AUTOREGRESSIVE)
        with status("speculative decoding"):
            speculative = await _texts(client, calls, Mode.SPECULATIVE)
    pairs = zip(plain, speculative, strict=True)
    report_check(
        CheckResult(
            num_texts=batch,
            num_tokens=max_tokens,
            dtype=info.dtype,
            accepted_tokens=sum(accepted for _, accepted in speculative),
            first_differences=tuple(first_difference(one, other) for (one, _), (other, _) in pairs),
        ),
        is_json=is_json,
    )


def report_check(result: CheckResult, *, is_json: bool) -> None:
    """Print the result.

    Raises:
        DifferentTextError: a text differs.
        NotSpeculativeError: no proposed token was accepted, so nothing was compared.
    """
    if is_json:
        write(json.dumps(asdict(result) | {"num_equal": result.num_equal}) + "\n")
    if result.num_equal < result.num_texts:
        raise DifferentTextError(
            f"{result.num_equal} of {result.num_texts} texts are identical, the first different "
            f"tokens are {result.first_differences}; please report this with the output of lscpu"
        )
    if not result.accepted_tokens:
        raise NotSpeculativeError("no proposed token was accepted, so nothing was compared")
    if not is_json:
        out.print(
            Text("identical", style="green"),
            f": {result.num_equal} of {result.num_texts} texts, all at the same time "
            f"({result.accepted_tokens} accepted tokens)",
            sep="",
        )


def _calls(batch: int, max_tokens: int) -> list[GenerateCall]:
    return [
        GenerateCall(
            prompt=prompt,
            sampling=SamplingParams(
                temperature=float(index % 2), ignore_eos=True, seed=index, max_tokens=max_tokens
            ),
        )
        for index, prompt in enumerate(held_out_prompts(batch, num_chars=PROMPT_CHARS))
    ]


async def _texts(
    client: TargetClient, calls: Sequence[GenerateCall], mode: Mode
) -> list[tuple[list[TokenId], int]]:
    """Generate all texts at the same time; return the tokens and the number of accepted ones."""
    return await asyncio.gather(*(_text(client, replace(call, mode=mode)) for call in calls))


async def _text(client: TargetClient, call: GenerateCall) -> tuple[list[TokenId], int]:
    tokens: list[TokenId] = []
    accepted = 0
    async for chunk in client.generate(call):
        tokens += chunk.token_ids
        if chunk.statistics is not None:
            accepted += chunk.statistics.accepted_tokens
    return tokens, accepted

"""A cell of the exactness suite: texts of a target with a draft against those of one without."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache

import pytest
from tests.pairs import QUICK, draft_of, target_of
from tests.processes import ProcessUnderTest
from tests.texts import Text, read

from ssd.demo.corpus import held_out_prompts
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.types import Mode, SamplingParams

TEMPERATURES = (0.0, 0.6, 1.0)
NUM_PROMPTS = 24


@dataclass(frozen=True)
class Size:
    """How much of a cell runs."""

    lookahead: int
    num_prompts: int
    num_threads: int = 1
    """Of a forward pass."""
    engine: str = "openvino"
    """Of target and drafts."""
    max_num_seqs: int = 16
    """With ``--deterministic``, each pass has the rows of as many sequences."""
    max_tokens: int = 48
    """Of each text."""
    flags: tuple[str, ...] = ()
    """Of target and drafts, also without speculation."""
    spare_draft_flags: tuple[str, ...] = ()
    """Of drafts that only need to be there: late ones, and those that replace another one."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """Prompts of different lengths that are not in the training data."""
        return prompts_of()[:: math.ceil(NUM_PROMPTS / self.num_prompts)]

    @property
    def shape(self) -> tuple[str, ...]:
        """Flags of target and drafts."""
        return (
            *("--dtype", "float32", "--max-model-len", "512", "--lookahead", str(self.lookahead)),
            *("--threads", str(self.num_threads), "--engine", self.engine, *self.flags),
        )


FEW = pytest.param(Size(6, 3, max_num_seqs=9, max_tokens=32, spare_draft_flags=QUICK), id="K6-few")
ALL = [
    pytest.param(
        Size(lookahead, NUM_PROMPTS, 2, engine),
        marks=pytest.mark.slow,
        id=f"{engine}-K{lookahead}-all",
    )
    for engine in ("openvino", "torch")
    for lookahead in (2, 6)
]


@cache
def prompts_of() -> tuple[str, ...]:
    """All prompts."""
    found = held_out_prompts(NUM_PROMPTS, num_chars=600)
    assert len(found) == NUM_PROMPTS
    # Short and long ones in a batch: chunks, padding and positions all differ.
    return tuple(prompt[: 40 + 24 * index] for index, prompt in enumerate(found))


Texts = dict[float, list[Text]]
"""By temperature, in the order of the prompts."""
Pair = AbstractAsyncContextManager[tuple[TargetClient, list[ProcessUnderTest]]]
"""A target's client and its drafts."""


@asynccontextmanager
async def pair(
    size: Size,
    *,
    draft: str = "demo://draft",
    num_drafts: int = 1,
    branches: int = 24,
    target_flags: Sequence[str] = ("--deterministic",),
    draft_flags: Sequence[str] = (),
) -> AsyncIterator[tuple[TargetClient, list[ProcessUnderTest]]]:
    """Run a target and its drafts; inside, they are linked."""
    shape = (*size.shape, "--branches", str(branches))
    async with AsyncExitStack() as stack:
        drafts = [
            await stack.enter_async_context(draft_of(draft, *shape, *draft_flags))
            for _ in range(num_drafts)
        ]
        flags = (*shape, "--max-num-seqs", str(size.max_num_seqs), *target_flags)
        started = target_of("demo://target", *flags, drafts=drafts)
        _, client = await stack.enter_async_context(started)
        yield client, drafts


async def wait_for_drafts(client: TargetClient, count: int) -> None:
    """Wait until the target has linked its drafts."""
    async with asyncio.timeout(60):
        # Links are in another process: there is no event to wait for.
        while (await client.model_info()).active_drafts < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def complete_all(
    client: TargetClient,
    size: Size,
    mode: Mode,
    temperatures: Sequence[float] = TEMPERATURES,
    begun: Sequence[asyncio.Event] = (),
) -> Texts:
    """Continue all prompts at all temperatures, all at the same time."""
    calls = [
        GenerateCall(
            prompt=prompt,
            sampling=SamplingParams(
                temperature=temperature,
                ignore_eos=True,
                seed=1000 + index,
                max_tokens=size.max_tokens,
            ),
            mode=mode,
        )
        for temperature in temperatures
        for index, prompt in enumerate(size.prompts)
    ]
    events: Sequence[asyncio.Event | None] = begun or [None] * len(calls)
    texts = await asyncio.gather(
        *(read(client, call, begun=event) for call, event in zip(calls, events, strict=True))
    )
    count = len(size.prompts)
    return {t: list(texts[i * count : (i + 1) * count]) for i, t in enumerate(temperatures)}


@dataclass(frozen=True)
class Row:
    """One cell that was compared with plain decoding."""

    draft: str
    lookahead: int
    temperature: float
    num_prompts: int
    num_tokens: int
    num_different: int
    hits: int
    looked_up: int
    late: int
    tokens_per_round: float
    num_proposed: int
    num_rejected: int
    """Proposed tokens that were not accepted."""


@dataclass(frozen=True)
class Report:
    """Collects the rows for the summary at the end."""

    properties: list[tuple[str, object]]

    def compare(self, name: str, size: Size, plain: Texts, found: Texts) -> list[Row]:
        """Return one row for each temperature; assert that no token differs."""
        rows = [self._row(name, size.lookahead, t, plain[t], found[t]) for t in found]
        for row in rows:
            assert row.num_tokens == row.num_prompts * size.max_tokens
            assert row.num_different == 0, f"{row.num_different} texts differ: {row}"
        return rows

    def _row(
        self, name: str, lookahead: int, temperature: float, plain: list[Text], found: list[Text]
    ) -> Row:
        assert len(plain) == len(found)
        statistics = [text.statistics for text in found]
        tokens = sum(len(text.token_ids) for text in found)
        row = Row(
            draft=name,
            lookahead=lookahead,
            temperature=temperature,
            num_prompts=len(found),
            num_tokens=tokens,
            num_different=sum(
                p.token_ids != f.token_ids for p, f in zip(plain, found, strict=True)
            ),
            hits=sum(s.hits for s in statistics),
            looked_up=sum(s.hits + s.misses + s.late for s in statistics),
            late=sum(s.late for s in statistics),
            tokens_per_round=tokens / sum(s.rounds for s in statistics),
            num_proposed=sum(s.proposed_tokens for s in statistics),
            num_rejected=sum(s.proposed_tokens - s.accepted_tokens for s in statistics),
        )
        self.properties.append((ROW, vars(row)))
        return row


ROW = "exactness"
"""Name of a row among a test's properties."""


@cache
def plain_texts(size: Size) -> Texts:
    """Return the texts of the target without a draft, in a process of its own."""

    async def run() -> Texts:
        async with pair(size, num_drafts=0) as (client, _):
            return await complete_all(client, size, Mode.AUTOREGRESSIVE)

    return asyncio.run(run())

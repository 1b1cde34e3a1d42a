"""Speculation never changes a token: SSD against plain decoding, token for token, fp32.

24 prompts x 48 tokens x three temperatures x two lookaheads, the prompts of a cell concurrently,
with drafts that are good, useless, perfect, absent, late, or die and come back. All over real
processes and real gRPC. The reference of a cell is the same target's own AUTOREGRESSIVE mode, in a
process of its own.
"""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.exactness.conftest import Report, Row

from ssd import demo
from ssd.cpu_plan import plan_cpus
from ssd.launch import Deployment, RunningDeployment, deployed, draft_process
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.types import GenerationChunk, Mode, SamplingParams, SpeculationStatistics, TokenId

pytestmark = pytest.mark.timeout(900)
TEMPERATURES = (0.0, 0.6, 1.0)
LOOKAHEADS = (2, 6)
MAX_TOKENS = 48
WAITS_FOR_TABLES = (
    *("--draft-deadline-ms", "10000", "--no-adaptive-deadline"),
    *("--no-circuit-breaker", "--backup", "none"),
)
"""With these no table is late, so hits do not depend on the machine's speed."""
LEAST_ACCEPTED = {2: 0.5, 6: 0.28}
"""Share of the proposed tokens that the trained pair accepts at least, by lookahead."""
MOST_WAVES = 40
"""Waves of prompts that a killed draft is given to come back."""


@dataclass(frozen=True)
class Text:
    """One continuation."""

    token_ids: tuple[TokenId, ...]
    statistics: SpeculationStatistics


def unused_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def pair(
    lookahead: int,
    *,
    draft: str = "demo://draft",
    num_drafts: int = 1,
    branches: int = 24,
    target_flags: Sequence[str] = (),
    draft_flags: Sequence[str] = (),
) -> Deployment:
    return Deployment(
        draft=draft,
        num_drafts=num_drafts,
        common_flags=(
            *("--dtype", "float32", "--max-model-len", "1024"),
            *("--lookahead", str(lookahead), "--branches", str(branches)),
        ),
        target_flags=("--deterministic", *target_flags),
        draft_flags=tuple(draft_flags),
    )


async def complete(client: TargetClient, prompt: str, index: int, cell: tuple[float, Mode]) -> Text:
    temperature, mode = cell
    call = GenerateCall(
        prompt=prompt,
        sampling=SamplingParams(temperature=temperature, ignore_eos=True),
        seed=1000 + index,
        max_tokens=MAX_TOKENS,
        mode=mode,
    )
    token_ids: list[TokenId] = []
    last: GenerationChunk | None = None
    async for chunk in client.generate(call):
        token_ids.extend(chunk.token_ids)
        last = chunk
    assert last is not None
    assert last.statistics is not None
    return Text(tuple(token_ids), last.statistics)


async def complete_all(
    client: TargetClient, prompts: Sequence[str], temperature: float, mode: Mode
) -> list[Text]:
    calls = [complete(client, text, i, (temperature, mode)) for i, text in enumerate(prompts)]
    return list(await asyncio.gather(*calls))


async def wait_for_drafts(client: TargetClient, count: int) -> None:
    async with asyncio.timeout(60):
        # Links live in another process: there is no event to wait on.
        while (await client.model_info()).active_drafts < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@cache
def plain_texts(lookahead: int, prompts: tuple[str, ...]) -> dict[float, list[tuple[TokenId, ...]]]:
    """What the target writes alone, by temperature."""

    async def run() -> dict[float, list[tuple[TokenId, ...]]]:
        async with (
            deployed(pair(lookahead, num_drafts=0)) as running,
            TargetClient(running.target.grpc_address) as client,
        ):
            found = {
                t: await complete_all(client, prompts, t, Mode.AUTOREGRESSIVE) for t in TEMPERATURES
            }
        return {t: [text.token_ids for text in texts] for t, texts in found.items()}

    return asyncio.run(run())


def compare(
    report: Report, name: str, cell: tuple[int, float], plain: Sequence[object], found: list[Text]
) -> Row:
    """Add a row to the report, and return it; a differing token fails the test here."""
    assert len(plain) == len(found)
    statistics = [text.statistics for text in found]
    tokens = sum(len(text.token_ids) for text in found)
    row = Row(
        draft=name,
        lookahead=cell[0],
        temperature=cell[1],
        num_prompts=len(found),
        num_tokens=tokens,
        num_different=sum(p != f.token_ids for p, f in zip(plain, found, strict=True)),
        hits=sum(s.hits for s in statistics),
        looked_up=sum(s.hits + s.misses + s.late for s in statistics),
        late=sum(s.late for s in statistics),
        tokens_per_round=tokens / sum(s.rounds for s in statistics),
        num_proposed=sum(s.proposed_tokens for s in statistics),
        num_rejected=sum(s.proposed_tokens - s.accepted_tokens for s in statistics),
    )
    report.rows.append(row)
    assert tokens == len(found) * MAX_TOKENS
    assert row.num_different == 0, f"{row.num_different} of {len(found)} texts differ: {row}"
    return row


def run_cells(
    report: Report, prompts: list[str], name: str, lookahead: int, deployment: Deployment
) -> list[Row]:
    """Run the three temperatures of one deployment and compare each with plain decoding."""
    plain = plain_texts(lookahead, tuple(prompts))

    async def run() -> dict[float, list[Text]]:
        async with (
            deployed(deployment) as running,
            TargetClient(running.target.grpc_address) as client,
        ):
            await wait_for_drafts(client, deployment.num_drafts)
            return {
                t: await complete_all(client, prompts, t, Mode.SPECULATIVE) for t in TEMPERATURES
            }

    found = asyncio.run(run())
    return [compare(report, name, (lookahead, t), plain[t], found[t]) for t in TEMPERATURES]


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_trained_draft_hits_and_changes_no_token(
    lookahead: int, prompts: list[str], report: Report
) -> None:
    deployment = pair(lookahead, target_flags=WAITS_FOR_TABLES)
    for row in run_cells(report, prompts, "trained", lookahead, deployment):
        # Measured .91 to .96; .69, .57, .56 accepted of K = 2, and .45, .34, .33 of K = 6. What
        # differs between runs is when a session opens, and rounds before that are not counted.
        assert row.late == 0
        assert row.hits > 0.87 * row.looked_up
        assert row.num_rejected < (1 - LEAST_ACCEPTED[lookahead]) * row.num_proposed


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_draft_dead_from_the_start_changes_no_token(
    lookahead: int, prompts: list[str], report: Report
) -> None:
    deployment = pair(lookahead, num_drafts=0, target_flags=("--drafts", unused_address()))
    for row in run_cells(report, prompts, "dead", lookahead, deployment):
        assert row.looked_up == 0


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_draft_that_is_always_late_changes_no_token(
    lookahead: int, prompts: list[str], report: Report
) -> None:
    deployment = pair(
        lookahead,
        target_flags=("--draft-deadline-ms", "2", "--no-circuit-breaker"),
        draft_flags=("--inject-delay-ms", "150"),
    )
    rows = run_cells(report, prompts, "delayed", lookahead, deployment)
    assert sum(row.late for row in rows) > 0


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_draft_of_random_weights_changes_no_token(
    lookahead: int, prompts: list[str], report: Report, tmp_path: Path
) -> None:
    folder = random_draft(tmp_path / "random")
    deployment = pair(lookahead, draft=str(folder), target_flags=("--draft-deadline-ms", "1000"))
    for row in run_cells(report, prompts, "random weights", lookahead, deployment):
        assert row.looked_up > row.hits


@pytest.mark.slow
@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_draft_that_is_the_target_always_hits_and_proposes_what_is_accepted(
    lookahead: int, prompts: list[str], report: Report
) -> None:
    deployment = pair(
        lookahead,
        draft="demo://target",
        branches=8,
        target_flags=WAITS_FOR_TABLES,
    )
    for row in run_cells(report, prompts, "the target itself", lookahead, deployment):
        # One tie in fp32 (target and draft run at different row counts) may cost a hit or what is
        # left of a proposal; a wrong key or value costs both in many rounds.
        assert row.late == 0
        assert row.looked_up - row.hits <= 1
        assert row.num_rejected <= lookahead
        # A hit proposes K tokens, but for the last one of a text: K+1 tokens a round, then.
        assert row.num_proposed >= lookahead * (row.hits - row.num_prompts)
        assert row.tokens_per_round > 1.2


def random_draft(folder: Path) -> Path:
    """The embedded draft's shape with weights that know nothing."""
    source = demo.folder("draft")
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(11)
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            noise = torch.randn(tensor.shape, generator=generator) * 0.05
            weights[name] = noise.to(tensor.dtype)
    save_file(weights, folder / "model.safetensors")
    return folder


async def kill_and_restart(
    running: RunningDeployment, deployment: Deployment, prompts: list[str], temperature: float
) -> list[list[Text]]:
    """Kill the draft with all prompts in flight, start it again, and go on until it hits again."""
    waves: list[list[Text]] = []
    draft = running.drafts[0]
    async with TargetClient(running.target.grpc_address) as client:
        await wait_for_drafts(client, 1)
        flight = asyncio.create_task(complete_all(client, prompts, temperature, Mode.SPECULATIVE))
        await asyncio.sleep(0.05)
        draft.kill()
        await draft.wait()
        replacement = draft_process(
            deployment,
            plan_cpus(deployment.allowed_cpus, 1),
            0,
            lambda _name, _event: None,
            port=int(draft.grpc_address.rpartition(":")[2]),
        )
        await replacement.start()
        try:
            while True:
                waves.append(await flight)
                hits = sum(text.statistics.hits for text in waves[-1])
                if len(waves) > 1 and hits > 0:
                    return waves
                assert len(waves) < MOST_WAVES, "the draft came back and was never used again"
                flight = asyncio.create_task(
                    complete_all(client, prompts, temperature, Mode.SPECULATIVE)
                )
        finally:
            await replacement.stop()


CELLS = [
    pytest.param(k, t, marks=() if (k, t) == (6, 1.0) else pytest.mark.slow)
    for k in LOOKAHEADS
    for t in TEMPERATURES
]


@pytest.mark.parametrize(("lookahead", "temperature"), CELLS)
def test_a_draft_killed_and_restarted_in_flight_changes_no_token(
    lookahead: int, temperature: float, prompts: list[str], report: Report
) -> None:
    plain = plain_texts(lookahead, tuple(prompts))[temperature]
    deployment = pair(lookahead, target_flags=("--draft-deadline-ms", "1000"))

    async def run() -> list[list[Text]]:
        async with deployed(deployment) as running:
            return await kill_and_restart(running, deployment, prompts, temperature)

    waves = asyncio.run(run())
    for name, wave in (("killed in flight", waves[0]), ("killed, back again", waves[-1])):
        compare(report, name, (lookahead, temperature), plain, wave)
    for wave in waves[1:-1]:
        assert [text.token_ids for text in wave] == plain

"""Equal tokens of all modes through the real processes, and the speed of each mode.

The target is deterministic and runs one sequence at a time: its verifies have one shape, and tokens
are equal bit for bit. Speeds are those of batch 1.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

import pytest
import torch
from tests import pairs
from tests.gpu.checkpoints import Pair, llama_pair, qwen3_pair
from tests.gpu.environment import Environment, Figure
from tests.gpu.models import DTYPE_OF, LOOKAHEAD, MAX_MODEL_LEN, STATIC
from tests.texts import read

from ssd.demo.corpus import held_out_prompts
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall, Prompt
from ssd.runtime.launch import Deployment, RunningDeployment, deployed
from ssd.types import Mode, SamplingParams, SpeculationStatistics, TokenId
from ssd_bench.machine import peak_memory_bytes
from ssd_bench.metrics import BatchFigures, Continuation, batch_figures
from ssd_bench.runs import MODES, why_no_hits

BRANCHES = 24
WIDENING = {"cuda": 4, "cpu": 1}
MAX_TOKENS = {"cuda": 128, "cpu": 16}
NUM_PROMPTS = {"cuda": 3, "cpu": 1}
PROMPT_TOKENS = 100
TEMPERATURES = (0.0, 1.0)
READY_SECONDS = 100.0
MAX_WARM_UPS = 20
"""Texts before those that are measured: one, and with drafts until one has a hit. On a busy CPU, a
text can end before the draft has opened its session."""
MAX_SESSIONS = 2
"""Sessions of a draft: the running one, and the last one until it is closed. Each number of
sessions up to it is a shape to compile."""
ONE_SHAPE = ("--deterministic", "--max-num-seqs", "1")
TWO_RANKS = ("--tensor-parallel-size", "2")


@dataclass(frozen=True, slots=True)
class Text:
    """One continuation of each mode."""

    mode: str
    temperature: float
    prompt: int
    continuation: Continuation


@pytest.mark.check("tokens of the embedded pair", is_slow=True)
def test_all_modes_of_the_embedded_pair_have_the_same_tokens(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    """The pair is widened on a GPU."""
    device = environment.device
    target = f"demo://target?widen={WIDENING[device]}"
    deployment = deployment_of(target, "demo://draft", environment, ONE_SHAPE)
    prompts = held_out_prompts(NUM_PROMPTS[device], num_chars=450)
    asyncio.run(check_pair(deployment, prompts, environment, figures))


@pytest.mark.check("tokens of llama", is_slow=True)
def test_all_modes_of_llama_have_the_same_tokens(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    check_random_pair(llama_pair(environment), environment, figures)


@pytest.mark.check("tokens of qwen3")
def test_all_modes_of_qwen3_have_the_same_tokens(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    check_random_pair(qwen3_pair(environment), environment, figures)


@pytest.mark.check("tokens of two ranks", is_slow=True)
def test_all_modes_of_two_ranks_have_the_same_tokens(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    """The draft shares the second GPU with rank 1: its speed is not that with its own GPU."""
    if environment.is_cuda and torch.cuda.device_count() < 2:
        pytest.skip("two ranks need two GPUs, and this machine has one")
    check_random_pair(llama_pair(environment), environment, figures, TWO_RANKS)
    figures["shares_gpu"] = environment.is_cuda


def check_random_pair(
    pair: Pair,
    environment: Environment,
    figures: dict[str, Figure],
    flags: tuple[str, ...] = (),
) -> None:
    """Compare the modes of random weights; ``flags`` are those of the target."""
    target, draft = map(str, pair)
    deployment = deployment_of(target, draft, environment, (*ONE_SHAPE, *flags))
    asyncio.run(check_pair(deployment, counting_prompts(environment), environment, figures))


def text(mode: str, *token_ids: int, hits: int) -> Text:
    statistics = SpeculationStatistics(
        mode=Mode.SPECULATIVE, rounds=2, hits=hits, misses=1, verify_seconds=1, round_seconds=1
    )
    return Text(mode, 0.0, 0, Continuation(token_ids, statistics))


def test_a_different_token_is_a_wrong_result() -> None:
    with pytest.raises(AssertionError, match=r"ssd differs from ar .* from token 1 of 3 on"):
        compare_texts([text("ar", 1, 2, 3, hits=0), text("ssd", 1, 9, 3, hits=1)])


def test_a_run_without_a_hit_is_a_wrong_result() -> None:
    with pytest.raises(AssertionError, match="no round of ssd was a hit"):
        compare_texts([text("ar", 1, 2, hits=0), text("ssd", 1, 2, hits=0)])


def counting_prompts(environment: Environment) -> list[tuple[TokenId, ...]]:
    """Return prompts of increasing token ids, as the random models continue them."""
    return [
        tuple(range(prompt * PROMPT_TOKENS, (prompt + 1) * PROMPT_TOKENS))
        for prompt in range(NUM_PROMPTS[environment.device])
    ]


def shares_gpu(environment: Environment) -> bool:
    """Whether target and draft have one GPU together, so that a table delays a verify."""
    return environment.is_cuda and torch.cuda.device_count() == 1


def deployment_of(
    target: str,
    draft: str,
    environment: Environment,
    target_flags: tuple[str, ...],
    max_sessions: int = MAX_SESSIONS,
) -> Deployment:
    """Return both processes on the device; with two GPUs, the draft has the second one."""
    on_two = environment.is_cuda and torch.cuda.device_count() > 1
    draft_device = "cuda:1" if on_two else environment.target_device
    return Deployment(
        target=target,
        draft=draft,
        is_synchronous=True,
        common_flags=(
            *("--lookahead", str(LOOKAHEAD), "--branches", str(BRANCHES)),
            *("--max-model-len", str(MAX_MODEL_LEN)),
            *("--engine", STATIC, "--dtype", DTYPE_OF[environment.device]),
        ),
        target_flags=(
            *("--device", environment.target_device),
            *target_flags,
            *(() if environment.is_cuda else pairs.LONG_WAIT),
        ),
        draft_flags=("--device", draft_device, "--max-sessions", str(max_sessions)),
    )


async def check_pair(
    deployment: Deployment,
    prompts: Sequence[Prompt],
    environment: Environment,
    figures: dict[str, Figure],
) -> None:
    """Generate all texts in all modes, measure and compare them.

    Raises:
        SSDError: a process cannot start, or a request failed.
    """
    free_before = _free_device_bytes(environment)
    async with contextlib.AsyncExitStack() as stack:
        # On a CPU, the processes are forks: their imports would take longer than the check.
        start = deployed if environment.is_cuda else pairs.deployed
        running = await stack.enter_async_context(start(deployment))
        client = await stack.enter_async_context(
            TargetClient(running.target.grpc_address, ready_seconds=READY_SECONDS)
        )
        info = await client.model_info()
        figures |= {
            "device": info.device,
            "dtype": info.dtype,
            "shares_gpu": shares_gpu(environment),
            "attention": info.attention_backend,
        }
        warm_ups: list[Text] = []
        texts: list[Text] = []
        for name, mode in MODES.items():
            warm_up = _call(prompts[0], mode, TEMPERATURES[0], environment)
            for _ in range(MAX_WARM_UPS):
                text = Text(name, TEMPERATURES[0], 0, await _generate(client, warm_up))
                warm_ups.append(text)
                if mode is not Mode.SPECULATIVE or text.continuation.statistics.hits:
                    break
            for temperature in TEMPERATURES:
                for index, prompt in enumerate(prompts):
                    call = _call(prompt, mode, temperature, environment)
                    texts.append(Text(name, temperature, index, await _generate(client, call)))
                figures |= _speeds(texts, name, temperature)
        figures |= _memory(running, free_before, environment)
        (link,) = (await client.pool_status()).links
        figures |= {
            "channel": link.channel + (f": {link.channel_reason}" if link.channel_reason else ""),
            "transport": link.transport,
        }
    compare_texts([*warm_ups, *texts])
    figures["tokens_compared"] = sum(len(text.continuation.token_ids) for text in texts)


def _call(prompt: Prompt, mode: Mode, temperature: float, environment: Environment) -> GenerateCall:
    return GenerateCall(
        prompt=prompt,
        sampling=SamplingParams(
            temperature=temperature,
            ignore_eos=True,
            seed=7,
            max_tokens=MAX_TOKENS[environment.device],
        ),
        mode=mode,
    )


async def _generate(client: TargetClient, call: GenerateCall) -> Continuation:
    found = await read(client, call)
    return Continuation(found.token_ids, found.statistics)


def compare_texts(texts: Sequence[Text]) -> None:
    """Compare all texts with those of plain decoding; a round of ``ssd`` must be a hit."""
    plain = {(each.temperature, each.prompt): each for each in texts if each.mode == "ar"}
    for each in texts:
        expected = plain[each.temperature, each.prompt].continuation.token_ids
        pairs = enumerate(zip_longest(each.continuation.token_ids, expected))
        index = next((place for place, (a, b) in pairs if a != b), None)
        assert index is None, (
            f"{each.mode} differs from ar at temperature {each.temperature:g}, prompt "
            f"{each.prompt}: from token {index} of {len(expected)} on"
        )
    speculative = [batch_figures([each.continuation], 1) for each in texts if each.mode == "ssd"]
    has_hits = any(found.hit_rate for found in speculative)
    assert has_hits, f"no round of ssd was a hit: {why_no_hits(speculative)}"


def _speeds(texts: Sequence[Text], mode: str, temperature: float) -> dict[str, Figure]:
    """Return medians over the prompts, by name."""
    measured = [
        batch_figures([text.continuation], 1)
        for text in texts
        if text.mode == mode and text.temperature == temperature
    ]

    def middle(name: str, digits: int) -> float:
        return round(float(median(getattr(each, name) for each in measured)), digits)

    prefix = f"{mode}_t{temperature:g}"
    figures: dict[str, Figure] = {f"{prefix}_tokens_per_second": middle("tokens_per_second", 1)}
    if mode == "ar":
        return figures
    figures |= {
        f"{prefix}_tokens_per_round": middle("tokens_per_round", 2),
        f"{prefix}_verify_ms": middle("verify_ms", 2),
        f"{prefix}_round_ms": middle("round_ms", 2),
        f"{prefix}_round_minus_verify_ms": round(
            float(median(each.round_ms - each.verify_ms for each in measured)), 3
        ),
    }
    if mode == "ssd":
        figures |= {
            f"{prefix}_efficiency": middle("efficiency", 3),
            f"{prefix}_hit_rate": round(median(_hit_rate(each) for each in measured), 2),
        }
    return figures


def _hit_rate(figures: BatchFigures) -> float:
    return figures.hit_rate or 0.0


def _free_device_bytes(environment: Environment) -> int:
    if not environment.is_cuda:
        return 0
    return sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))


def _memory(
    running: RunningDeployment, free_before: int, environment: Environment
) -> dict[str, Figure]:
    """Return the memory of both processes: of the devices, or the peak of each process."""
    if environment.is_cuda:
        used = free_before - _free_device_bytes(environment)
        return {"device_memory_gb": round(used / 1e9, 1)}
    processes = {"target": running.target, "draft": running.drafts[0]}
    return {
        f"{name}_peak_memory_mb": round(peak_memory_bytes(process.pid) / 1e6)
        for name, process in processes.items()
    }

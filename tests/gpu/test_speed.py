"""Speed and equal texts of all modes at several batch sizes, in the fast mode of the target.

The target proves at its start that rows have the same bits in all of its shapes, or uses fewer.
"""

import asyncio
from collections.abc import Sequence
from statistics import median

import pytest
from tests.gpu.checkpoints import llama_pair
from tests.gpu.environment import Environment, Figure
from tests.gpu.test_tokens import PROMPT_TOKENS, deployment_of, shares_gpu

from ssd_bench.metrics import BatchFigures
from ssd_bench.runs import MODES, BenchmarkRun, Cell, run

BATCHES = {"cuda": (8, 16), "cpu": (1, 2)}
"""On a GPU, ``tokens`` measures batch 1."""
MAX_TOKENS = {"cuda": 96, "cpu": 16}
REPETITIONS = {"cuda": 2, "cpu": 1}
TEMPERATURE = 1.0
NAMES = ("tokens_per_second", "verify_ms", "round_ms", "efficiency", "tokens_per_round", "hit_rate")
OF_PLAIN_DECODING = ("tokens_per_second", "verify_ms")


@pytest.mark.check("speed of llama", is_slow=True)
def test_all_modes_have_equal_texts_and_are_measured_at_each_batch_size(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    pair, device = llama_pair(environment), environment.device
    largest = max(BATCHES[device])
    plan = BenchmarkRun(
        deployment=deployment_of(
            str(pair.target),
            str(pair.draft),
            environment,
            target_flags=("--max-num-seqs", str(largest)),
            max_sessions=largest,
        ),
        target_folder=pair.target,
        prompts={"counting": [_counting(first) for first in range(largest)]},
        batches=BATCHES[device],
        temperatures=(TEMPERATURE,),
        max_tokens=MAX_TOKENS[device],
        repetitions=REPETITIONS[device],
        # On a busy CPU, these short texts can end before the draft has opened their sessions.
        needs_hits=environment.is_cuda,
    )
    results = asyncio.run(run(plan, lambda: None))
    figures |= {
        "shares_gpu": shares_gpu(environment),
        "texts_compared": sum(cell.num_compared for cell in results.cells),
        "texts_that_differ": sum(cell.num_different for cell in results.cells),
        "table_ms": round(results.table_seconds * 1000, 2),
    }
    for cell in results.cells:
        figures |= _of_cell(cell)
        for mode in MODES:
            assert float(figures[f"{mode}_{cell.batch}_tokens_per_second"]) > 0
    assert not figures["texts_that_differ"], "a text depends on its mode"


def _counting(prompt: int) -> str:
    """Return the words of increasing token ids, as the random models continue them."""
    first = prompt * PROMPT_TOKENS // 4
    return " ".join(f"w{index}" for index in range(first, first + PROMPT_TOKENS))


def _of_cell(cell: Cell) -> dict[str, Figure]:
    differences: dict[str, Figure] = {
        f"{mode}_{cell.batch}_round_minus_verify_ms": round(
            float(median(each.round_ms - each.verify_ms for each in repetitions)), 3
        )
        for mode, repetitions in cell.figures.items()
        if mode != "ar"
    }
    return differences | {
        f"{mode}_{cell.batch}_{name}": round(value, 3)
        for mode, repetitions in cell.figures.items()
        for name in (OF_PLAIN_DECODING if mode == "ar" else NAMES)
        if (value := _median(repetitions, name)) is not None
    }


def _median(repetitions: Sequence[BatchFigures], name: str) -> float | None:
    values = [getattr(each, name) for each in repetitions]
    return None if None in values else float(median(values))

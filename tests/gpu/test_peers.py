"""Other engines with the same checkpoints: tokens a second of one greedy sequence."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import pytest
import torch
from tests.gpu.checkpoints import llama_pair
from tests.gpu.environment import Environment, Figure
from tests.gpu.models import DTYPE_OF, open_transformers

PROMPT_TOKENS = 100
NEW_TOKENS = {"cuda": 128, "cpu": 8}
WARM_UP_TOKENS = 4
VLLM_MEMORY_SHARE = 0.6


@pytest.mark.check("peer transformers")
def test_transformers_is_measured(environment: Environment, figures: dict[str, Figure]) -> None:
    pair, num_tokens = llama_pair(environment), NEW_TOKENS[environment.device]
    target, draft = (
        open_transformers(folder, DTYPE_OF[environment.device], environment)
        for folder in (pair.target, pair.draft)
    )
    prompt_1S = torch.arange(PROMPT_TOKENS, device=target.device)[None]

    def generate(count: int, **options: Any) -> None:
        target.generate(
            prompt_1S,
            attention_mask=torch.ones_like(prompt_1S),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            **options,
        )

    assisted = partial(generate, assistant_model=draft)
    figures["ar_tokens_per_second"] = tokens_per_second(generate, num_tokens)
    figures["assisted_tokens_per_second"] = tokens_per_second(assisted, num_tokens)


@pytest.mark.check("peer vllm", on=("cuda",))
def test_vllm_is_measured(environment: Environment, figures: dict[str, Figure]) -> None:
    vllm = pytest.importorskip("vllm", reason="the package vllm is not installed")
    engine = vllm.LLM(
        model=str(llama_pair(environment).target),
        dtype="bfloat16",
        max_model_len=1024,
        gpu_memory_utilization=VLLM_MEMORY_SHARE,
        skip_tokenizer_init=True,
    )
    prompt = {"prompt_token_ids": list(range(PROMPT_TOKENS))}

    def generate(count: int) -> None:
        parameters = vllm.SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        engine.generate([prompt], parameters, use_tqdm=False)

    figures["version"] = vllm.__version__
    num_tokens = NEW_TOKENS[environment.device]
    figures["ar_tokens_per_second"] = tokens_per_second(generate, num_tokens)


def tokens_per_second(generate: Callable[[int], None], num_tokens: int) -> float:
    """Return the speed of decoding: the difference of two texts contains no prefill."""

    def seconds(count: int) -> float:
        started = perf_counter()
        generate(count)
        return perf_counter() - started

    seconds(WARM_UP_TOKENS)
    return round((num_tokens - 1) / max(seconds(num_tokens) - seconds(1), 1e-9), 1)

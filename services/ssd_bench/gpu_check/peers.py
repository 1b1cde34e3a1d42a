"""Other engines with the same checkpoints: tokens a second of one greedy sequence."""

from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch

from ssd_bench.gpu_check.checkpoints import llama_pair
from ssd_bench.gpu_check.models import DTYPE_OF, open_transformers
from ssd_bench.gpu_check.outcome import Environment, Figure, SkipError

PROMPT_TOKENS = 100
NEW_TOKENS = {"cuda": 128, "cpu": 8}
WARM_UP_TOKENS = 4
VLLM_MEMORY_SHARE = 0.6


def measure_transformers(environment: Environment) -> dict[str, Figure]:
    """Measure plain and assisted generation of transformers."""
    pair = llama_pair(environment)
    target, draft = (
        open_transformers(folder, DTYPE_OF[environment.device], environment)
        for folder in (pair.target, pair.draft)
    )
    prompt_1S = torch.arange(PROMPT_TOKENS, device=target.device)[None]

    def speed(**options: Any) -> float:
        def generate(num_tokens: int) -> float:
            started = perf_counter()
            target.generate(
                prompt_1S,
                attention_mask=torch.ones_like(prompt_1S),
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                do_sample=False,
                **options,
            )
            return perf_counter() - started

        generate(WARM_UP_TOKENS)
        # The difference contains no prefill.
        whole, first = generate(NEW_TOKENS[environment.device]), generate(1)
        return (NEW_TOKENS[environment.device] - 1) / max(whole - first, 1e-9)

    return {
        "ar_tokens_per_second": round(speed(), 1),
        "assisted_tokens_per_second": round(speed(assistant_model=draft), 1),
    }


def measure_vllm(environment: Environment) -> dict[str, Figure]:
    """Measure plain generation of vLLM."""
    if find_spec("vllm") is None:
        raise SkipError("the package vllm is not installed")
    if not environment.is_cuda:
        raise SkipError("vllm is measured on GPUs only")
    pair = llama_pair(environment)
    vllm = import_module("vllm")
    engine = vllm.LLM(
        model=str(pair.target),
        dtype="bfloat16",
        max_model_len=1024,
        gpu_memory_utilization=VLLM_MEMORY_SHARE,
        skip_tokenizer_init=True,
    )
    prompt = {"prompt_token_ids": list(range(PROMPT_TOKENS))}

    def generate(num_tokens: int) -> float:
        parameters = vllm.SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        started = perf_counter()
        engine.generate([prompt], parameters, use_tqdm=False)
        return perf_counter() - started

    generate(WARM_UP_TOKENS)
    whole, first = generate(NEW_TOKENS[environment.device]), generate(1)
    speed = (NEW_TOKENS[environment.device] - 1) / max(whole - first, 1e-9)
    return {"version": vllm.__version__, "ar_tokens_per_second": round(speed, 1)}

"""Generates texts with vLLM; runs with the interpreter of vLLM's environment.

Reads an object from standard input: ``model``, ``jobs`` (each with ``prompt_ids``, ``seed`` and
sampling parameters), ``batch``, ``drafts`` (none: no speculation), ``plugin`` (its other settings),
``calls_to_bug`` (0: none; else after so many calls, two methods fail) and ``engine`` (arguments of
``LLM``). Prints a line for each batch, its token ids, one with the log-probabilities at each token
of the prompts where jobs request them, and a last one with the counters.
"""

import itertools
import json
import sys
from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY
from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter

from ssd_vllm.requests import PoolRequests

CRASHES = "ssd_proposer_crashes_total"


def main() -> None:
    """Generate all texts."""
    task: dict[str, Any] = json.load(sys.stdin)
    speculation: dict[str, Any] = {}
    if task["drafts"]:
        speculation["speculative_config"] = {
            "method": "custom_class",
            "model": "ssd_vllm.Proposer",
            "num_speculative_tokens": 6,
        }
    plugin = {"drafts": task["drafts"], "draft_deadline_ms": 100, **task["plugin"]}
    if count := task["calls_to_bug"]:
        # In different steps.
        for more, name in enumerate(("begin_step", "propose")):
            setattr(PoolRequests, name, _failing(getattr(PoolRequests, name), count + more))
    llm = LLM(
        task["model"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        max_model_len=512,
        worker_cls="ssd_vllm.Worker",
        additional_config={"ssd": plugin},
        **speculation,
        **{"max_num_seqs": 8, **task["engine"]},
    )
    for first in range(0, len(task["jobs"]), task["batch"]):
        jobs = task["jobs"][first : first + task["batch"]]
        prompts = [{"prompt_token_ids": job.pop("prompt_ids")} for job in jobs]
        found = llm.generate(
            prompts, [SamplingParams(ignore_eos=True, **job) for job in jobs], use_tqdm=False
        )
        texts = [list(each.outputs[0].token_ids) for each in found]
        _put("BATCH", texts)
        if jobs[0].get("prompt_logprobs"):
            rows = [row or {} for each in found for row in each.prompt_logprobs]
            _put("LOGPROBS", [{key: one.logprob for key, one in row.items()} for row in rows])
    values = {each.name: each.value for each in llm.get_metrics() if isinstance(each, Counter)}
    _put("COUNTERS", values | {CRASHES: REGISTRY.get_sample_value(CRASHES)})


def _failing(method: Callable[..., Any], calls_to_bug: int) -> Callable[..., Any]:
    calls = itertools.count(1)

    def call(*given: Any) -> Any:
        if next(calls) % calls_to_bug == 0:
            raise ValueError("a bug")
        return method(*given)

    return call


def _put(name: str, value: object) -> None:
    sys.stdout.write(f"{name} {json.dumps(value)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

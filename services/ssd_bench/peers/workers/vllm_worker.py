"""vLLM on CPUs: plain, with n-grams, with a draft model, or with this product's drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from ssd_bench.peers.workers.wire import Batch, Complete, Config


def drafting(config: Config) -> dict[str, Any]:
    """Return the arguments of ``LLM`` that select the proposals."""
    if "drafts" in config:
        return {
            "worker_cls": "ssd_vllm.Worker",
            "additional_config": {"ssd": {"drafts": config["drafts"], "draft_deadline_ms": 100}},
            "speculative_config": {
                "method": "custom_class",
                "model": "ssd_vllm.Proposer",
                "num_speculative_tokens": config["lookahead"],
            },
        }
    if config.get("ngrams"):
        method: dict[str, Any] = {"method": "ngram", "prompt_lookup_max": 4}
    elif "draft" in config:
        method = {"method": "draft_model", "model": config["draft"]}
    else:
        return {}
    return {"speculative_config": {**method, "num_speculative_tokens": config["lookahead"]}}


def load(config: Config) -> tuple[str, Complete]:
    """Load the models."""
    engine = vllm.LLM(
        config["target"],
        dtype=config["dtype"],
        enforce_eager=True,
        max_model_len=config["length"],
        max_num_seqs=config["batch"],
        enable_prefix_caching=False,
        **drafting(config),
    )

    def complete(batch: Batch) -> Sequence[Sequence[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        sampling = [
            vllm.SamplingParams(
                temperature=batch["temperature"],
                seed=batch["seed"] + index,
                max_tokens=batch["max_tokens"],
                ignore_eos=True,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return vllm.__version__, complete

"""vLLM on CPUs: plain, with n-grams, with a draft model, or with this product's drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm

if TYPE_CHECKING:
    from ssd_bench.peers.workers.wire import Batch, Complete, Completion, Config


class LookupCounts:
    """Methods that vLLM adds to its worker, whose process has the metrics of the plugin."""

    _counted: tuple[int, int] = (0, 0)

    def new_lookups(self) -> list[int]:
        """Return the hits, and the rounds that needed a table, since the call before."""
        # Other contenders need no plugin.
        from ssd.observability.metrics import ROUNDS_TOTAL  # noqa: PLC0415

        samples = [sample for metric in ROUNDS_TOTAL.collect() for sample in metric.samples]
        counts = {
            sample.labels["result"]: int(sample.value)
            for sample in samples
            if sample.name.endswith("_total")
        }
        before = self._counted
        self._counted = counts["hit"], counts["hit"] + counts["miss"] + counts["late"]
        return [now - earlier for now, earlier in zip(self._counted, before, strict=True)]


def drafting(config: Config) -> dict[str, Any]:
    """Return the arguments of ``LLM`` that select the proposals."""
    if "drafts" in config:
        return {
            "worker_cls": "ssd_vllm.Worker",
            "worker_extension_cls": f"{__name__}.{LookupCounts.__name__}",
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

    def complete(batch: Batch) -> Completion:
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
        completion: Completion = {"tokens": [output.outputs[0].token_ids for output in outputs]}
        if "drafts" in config:
            completion["hits"], completion["looked_up"] = engine.collective_rpc("new_lookups")[0]
        return completion

    return vllm.__version__, complete

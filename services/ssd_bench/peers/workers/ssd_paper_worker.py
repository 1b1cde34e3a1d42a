"""The engine of the SSD paper's authors, on GPUs: plain, with a draft model, or SSD.

Its package is ``ssd`` too: this process has an environment without this product.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssd_bench.peers.workers.wire import Batch, Complete, Completion, Config

theirs = import_module("ssd")
BLOCK_TOKENS = 256
"""Its default; a block must have at least 2 K + 2 tokens."""
FAN_OUT = 3
"""Branches for each accepted length, as in its examples."""


def drafting(config: Config) -> dict[str, Any]:
    """Return the arguments of ``LLM`` that select the proposals.

    SSD needs one GPU more than the target, the others run on one.
    """
    if "draft" not in config:
        return {"num_gpus": 1}
    arguments = {"speculate": True, "draft": config["draft"], "speculate_k": config["lookahead"]}
    if config.get("has_own_device"):
        return {**arguments, "num_gpus": 2, "draft_async": True, "async_fan_out": FAN_OUT}
    return {**arguments, "num_gpus": 1}


def load(config: Config) -> tuple[str, Complete]:
    """Load the models."""
    engine = theirs.LLM(
        config["target"],
        max_model_len=config["length"],
        max_num_seqs=config["batch"],
        kvcache_block_size=BLOCK_TOKENS,
        **drafting(config),
    )

    def complete(batch: Batch) -> Completion:
        sampling = theirs.SamplingParams(
            temperature=batch["temperature"], max_new_tokens=batch["max_tokens"], ignore_eos=True
        )
        outputs, _ = engine.generate(batch["prompts"], sampling, use_tqdm=False)
        return {"tokens": [output["token_ids"] for output in outputs]}

    return version("ssd"), complete

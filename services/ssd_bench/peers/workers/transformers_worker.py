"""Hugging Face transformers: plain or assisted generation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers

if TYPE_CHECKING:
    from ssd_bench.peers.workers.wire import Batch, Complete, Completion, Config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(config: Config) -> tuple[str, Complete]:
    """Load the models."""
    torch.set_num_threads(config["threads"])
    dtype = DTYPES[config["dtype"]]

    def opened(folder: str) -> Any:
        # In evaluation mode, which from_pretrained sets.
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    target = opened(config["target"])
    drafting = {}
    if "draft" in config:
        draft = drafting["assistant_model"] = opened(config["draft"])
        draft.generation_config.num_assistant_tokens = config["lookahead"]
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0

    def complete(batch: Batch) -> Completion:
        transformers.set_seed(batch["seed"])
        prompts = torch.tensor(batch["prompts"])
        sampling: dict[str, Any] = {"do_sample": batch["temperature"] > 0}
        if sampling["do_sample"]:
            sampling |= {"temperature": batch["temperature"], "top_k": 0}
        outputs = target.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            min_new_tokens=batch["max_tokens"],
            max_new_tokens=batch["max_tokens"],
            **sampling,
            **drafting,
        )
        return {"tokens": outputs[:, prompts.shape[1] :].tolist()}

    return transformers.__version__, complete

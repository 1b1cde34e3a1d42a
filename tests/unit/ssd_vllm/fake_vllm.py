"""The parts of vLLM 0.32 that ``ssd_vllm.worker`` imports, as modules for ``sys.modules``.

``tests/vllm`` has the same behaviours with real vLLM.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

import torch

Calls = list[tuple[Any, ...]]
STOCK_ROW = (torch.tensor([-7]), None)
STOCK_ROWS = torch.tensor([[-7]])


class TopKTopPSampler:
    def forward_native(self, logits: Any, generators: Any, k: Any, p: Any) -> Any:
        raise NotImplementedError


class RejectionSampler:
    def forward(self, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
        raise NotImplementedError


class Sampler:
    @staticmethod
    def gather_logprobs(logprobs: Any, num_logprobs: Any, token_ids: Any) -> Any:
        raise NotImplementedError


class GPUModelRunner:
    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        raise NotImplementedError

    def _dummy_run(self, num_tokens: Any) -> Any:
        raise NotImplementedError

    def maybe_select_dummy_loras(self, lora_config: Any, num_scheduled_tokens: Any) -> Any:
        raise NotImplementedError

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        raise NotImplementedError


def expand_batch_to_tokens(x: Any, cu_num_tokens: Any, num_tokens: Any) -> Any:
    raise NotImplementedError


class BaseWorker:
    """Of both platforms."""

    calls: Calls

    def __init__(self, config: Any, runner: Any) -> None:
        self.vllm_config, self.model_runner = config, runner
        self.scheduler_config = config.scheduler_config

    def load_model(self, **options: Any) -> None:
        self.calls.append(("load_model", options))

    def compile_or_warm_up_model(self) -> Any:
        self.calls.append(("warm_up",))
        return "warm"

    def update_max_model_len(self, max_model_len: int) -> None:
        self.model_runner.max_model_len = max_model_len

    def execute_model(self, scheduler_output: Any) -> Any:
        return self.model_runner.execute_model(scheduler_output, None)

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


def sampling_functions(calls: Calls) -> dict[str, Any]:
    """Return functions that append to ``calls``."""

    def rejection_sample(  # noqa: PLR0913, PLR0917 - the parameters of vLLM
        draft_token_ids: Any,
        num_draft_tokens: Any,
        max_spec_len: Any,
        cu_num_draft_tokens: Any,
        draft_probs: Any,
        target_logits: Any,
        bonus_token_ids: Any,
        sampling_metadata: Any,
        synthetic_mode: bool = False,  # noqa: FBT001, FBT002 - likewise
    ) -> torch.Tensor:
        calls.append(("rejection_sample", synthetic_mode))
        return STOCK_ROWS

    def apply_sampling_constraints(
        logits: torch.Tensor, cu_num_draft_tokens: Any, sampling_metadata: Any
    ) -> torch.Tensor:
        calls.append(("constraints", len(logits)))
        return logits / 2

    def apply_top_k_top_p(logits: torch.Tensor, k: Any, p: Any) -> torch.Tensor:
        calls.append(("filters", k, p))
        return logits

    functions = (rejection_sample, apply_sampling_constraints, apply_top_k_top_p)
    return {each.__name__: each for each in functions}


def modules(calls: Calls, *, version: str = "0.32.0", is_cpu: bool = True) -> dict[str, ModuleType]:
    """Return the modules; their functions append to ``calls``."""
    functions = sampling_functions(calls)
    worker = type("Worker", (BaseWorker,), {"calls": calls})
    found: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            # The first rank always measures a second.
            "get_tp_group": lambda: SimpleNamespace(broadcast_object=lambda _seconds: 1.0)
        },
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: is_cpu)},
        "vllm.v1": {},
        "vllm.v1.sample": {},
        "vllm.v1.sample.rejection_sampler": {
            **functions,
            "expand_batch_to_tokens": expand_batch_to_tokens,
            "RejectionSampler": RejectionSampler,
            "Sampler": Sampler,
        },
        "vllm.v1.sample.ops": {},
        "vllm.v1.sample.ops.topk_topp_sampler": {**functions, "TopKTopPSampler": TopKTopPSampler},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": GPUModelRunner},
        "vllm.v1.worker.cpu_worker": {"CPUWorker": worker},
        "vllm.v1.worker.gpu_worker": {"Worker": worker},
    }
    made = {}
    for name, attributes in found.items():
        made[name] = ModuleType(name)
        vars(made[name]).update(attributes)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, made[name])
    return made

"""The worker: vLLM's own, which also gives the proposer its requests and draws coupled tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
import vllm
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ssd.errors import SetupError
from ssd.ports import SystemClock
from ssd_vllm.calibration import calibrate
from ssd_vllm.coupled import CoupledNoise, StepAddresses, accept
from ssd_vllm.proposer import Proposer, temperature_of
from ssd_vllm.requests import seed_of
from ssd_vllm.settings import KEY, PluginSettings, read
from ssd_vllm.versions import check_parameters, check_version

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


_STOCK_REJECTION = rejection_sampler.rejection_sample
_STOCK_CONSTRAINTS = rejection_sampler.apply_sampling_constraints
_USED = {
    GPUModelRunner.execute_model: ("self", "scheduler_output", "intermediate_tensors"),
    GPUModelRunner._sample: ("self", "logits", "spec_decode_metadata"),  # noqa: SLF001
    GPUModelRunner._dummy_run: ("self", "num_tokens"),  # noqa: SLF001
    GPUModelRunner.maybe_select_dummy_loras: ("self", "lora_config", "num_scheduled_tokens"),
    TopKTopPSampler.forward_native: ("self", "logits", "generators", "k", "p"),
    _STOCK_REJECTION: (
        *("draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens"),
        *("draft_probs", "target_logits", "bonus_token_ids", "sampling_metadata"),
    ),
    _STOCK_CONSTRAINTS: ("logits", "cu_num_draft_tokens", "sampling_metadata"),
    rejection_sampler.RejectionSampler.forward: (
        *("self", "metadata", "draft_probs", "logits", "sampling_metadata"),
    ),
    rejection_sampler.Sampler.gather_logprobs: ("logprobs", "num_logprobs", "token_ids"),
    rejection_sampler.expand_batch_to_tokens: ("x", "cu_num_tokens", "num_tokens"),
}
"""Functions of vLLM that are called or replaced, and their parameters."""


class Worker(BaseWorker):  # type: ignore[misc]
    """vLLM's worker of this platform, with a pool of drafts."""

    _proposer: Proposer | None = None
    """Set by ``load_model``, if the worker has one."""
    _settings: PluginSettings | None = None
    """Set by ``load_model``."""

    def load_model(self, **options: Any) -> None:
        """Load the target, then connect the proposer and the sampler to the steps.

        Raises:
            SetupError: the plugin does not support this version or configuration of vLLM.
        """
        check_version(vllm.__version__)
        check_parameters(_USED)
        config = self.vllm_config
        settings = self._settings = self._settings or read(config.additional_config)
        check_configuration(config)
        # vLLM's cache of compiled graphs depends on these values, and no graph on a setting here.
        config.additional_config = {
            key: value for key, value in config.additional_config.items() if key != KEY
        }
        super().load_model(**options)
        runner = self.model_runner
        drafter = getattr(runner, "drafter", None)
        self._proposer = drafter if isinstance(drafter, Proposer) else None
        if current_platform.is_cpu():
            _repair_expansion()
        if settings.sampling == "coupled":
            CoupledSampling(runner)
        if self._proposer is not None:
            self._proposer.connect(lambda: runner.input_batch.req_ids)
            _propose_at_any_length(runner)
            _begin_steps(runner, self._proposer)
            _force_each_end(runner)
            _give_logprobs_of_ids(runner.rejection_sampler)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then measure the target for the choice of proposals."""
        warmed_up = super().compile_or_warm_up_model()
        # vLLM runs passes of replicas together.
        is_alone = self.vllm_config.parallel_config.data_parallel_size == 1
        if self._proposer is not None and is_alone:
            runner = self.model_runner
            self._proposer.calibrate(
                calibrate(
                    runner.num_spec_tokens,
                    self.scheduler_config.max_num_seqs,
                    runner.max_num_tokens,
                    self._seconds_of,
                )
            )
        return warmed_up

    @torch.inference_mode()
    def _seconds_of(self, rows: int) -> float:
        """Run a pass of so many rows; returns its time on the first rank."""
        runner, clock = self.model_runner, SystemClock()
        began_at = clock.now()
        hidden_RD, _ = runner._dummy_run(rows, skip_eplb=True)  # noqa: SLF001 no public method
        # With LoRA, the run has left the adapters of fewer rows.
        num_scheduled_R = np.ones(rows, dtype=np.int32)
        with runner.maybe_select_dummy_loras(runner.lora_config, num_scheduled_R):
            logits_RV = runner.model.compute_logits(hidden_RD[:rows])
        if logits_RV is not None:
            # Waits for the device. On some platforms, only the first rank has logits.
            logits_RV.sum().item()
        return float(get_tp_group().broadcast_object(clock.now() - began_at))

    def update_max_model_len(self, max_model_len: int) -> None:
        """Change the maximum length; proposals stay possible up to the new one."""
        super().update_max_model_len(max_model_len)
        if self._proposer is not None:
            self._proposer.max_model_len = max_model_len
            _propose_at_any_length(self.model_runner)

    def shutdown(self) -> None:
        """End the links, then what vLLM ends."""
        if self._proposer is not None:
            self._proposer.links.stop()
        super().shutdown()


def check_configuration(config: Any) -> None:
    """Check what the worker cannot serve exactly.

    Raises:
        SetupError: another kind of speculation, whose positions are not known when it samples;
            ranks with a scheduler each, which do not receive the proposals of the first rank;
            stages of a pipeline, because vLLM then schedules a step with proposals before it has
            the token in front of them; or the model runner V2.
    """
    speculative = config.speculative_config
    if speculative is not None and speculative.model != "ssd_vllm.Proposer":
        raise SetupError(
            f"ssd_vllm.Worker has speculative_config with {speculative.method}; set method to "
            "custom_class and model to ssd_vllm.Proposer, or use vLLM's own worker"
        )
    parallel = config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise SetupError(
            "ssd_vllm.Worker does not support distributed_executor_backend external_launcher with "
            "several ranks; use mp or ray"
        )
    if speculative is not None and parallel.pipeline_parallel_size > 1:
        raise SetupError(
            "ssd_vllm.Worker does not support pipeline_parallel_size above 1 with drafts; use "
            "tensor_parallel_size, or remove speculative_config"
        )
    if config.use_v2_model_runner:
        raise SetupError(
            "ssd_vllm.Worker needs the model runner V1: set VLLM_USE_V2_MODEL_RUNNER=0"
        )


def _begin_steps(runner: Any, proposer: Proposer) -> None:
    """Give the proposer each step before it runs. Not all executors call the worker for a step."""
    execute = runner.execute_model

    def begin(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        proposer.begin_step(scheduler_output)
        return execute(scheduler_output, *arguments, **options)

    runner.execute_model = begin


def _propose_at_any_length(runner: Any) -> None:
    """Let vLLM ask for proposals near the maximum length; the pool's are never too long.

    Otherwise one long text would stop the proposals of all texts.
    """
    runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens


def _force_each_end(runner: Any) -> None:
    """Let vLLM 0.32 end each thinking of a text that exceeds its budget.

    With speculation, it forces an end of one token only once in a text.
    """
    sample = runner._sample  # noqa: SLF001 no public method has its arguments

    def sample_step(*arguments: Any) -> Any:
        budgets = getattr(runner.input_batch, "thinking_budget_state_holder", None)
        for state in budgets._state.values() if budgets else ():  # noqa: SLF001 likewise
            # Set with the row after a proposal, for the other rows of the same step.
            state["bonus_token_forced"] = False
        return sample(*arguments)

    runner._sample = sample_step  # noqa: SLF001 likewise


def _give_logprobs_of_ids(sampler: Any) -> None:
    """Let vLLM 0.32 return log-probabilities of the token ids that a request gives.

    With speculation, its sampler fails with them (``logprob_token_ids``), which ends the engine.
    Here they replace the most probable tokens, of which it returns as many for each row.
    """
    forward, gather = sampler.forward, sampler.sampler.gather_logprobs

    def forward_step(metadata: Any, draft_probs: Any, logits: Any, sampling: Any) -> Any:
        given = sampling.logprob_token_ids
        if not given:
            return forward(metadata, draft_probs, logits, sampling)
        num_most = max([sampling.max_num_logprobs or 0, *map(len, given.values())])

        def gather_given(logprobs_RV: torch.Tensor, count: int, token_ids: torch.Tensor) -> Any:
            found = gather(logprobs_RV, count, token_ids)
            num_rows = len(logprobs_RV) // len(metadata.num_draft_tokens)
            for index, ids in given.items():
                where = slice(index * num_rows, (index + 1) * num_rows), slice(1, 1 + len(ids))
                ids_N = torch.tensor(ids, device=logprobs_RV.device)
                found.logprob_token_ids[where] = ids_N.to(found.logprob_token_ids.dtype)
                found.logprobs[where] = logprobs_RV[where[0]][:, ids_N]
            return found

        sampler.sampler.gather_logprobs = gather_given
        try:
            changed = replace(sampling, logprob_token_ids=None, max_num_logprobs=num_most)
            return forward(metadata, draft_probs, logits, changed)
        finally:
            sampler.sampler.gather_logprobs = gather

    sampler.forward = forward_step


Row = tuple[torch.Tensor, torch.Tensor | None]
"""Token ids, and logits or log-probabilities that vLLM returns to the client."""


class CoupledSampling:
    """Replaces the two random choices of a runner of vLLM. The worker's thread.

    ``rejection_sample`` is a function of a module, which another runner may use too. It is replaced
    only while this runner samples, so engines of one process sample one after the other.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._noise = CoupledNoise()
        self._step: StepAddresses | None = None
        sampler = runner.sampler.topk_topp_sampler
        self._sample = runner._sample  # noqa: SLF001 no public method has its arguments
        runner._sample = self.sample  # noqa: SLF001 likewise
        self._stock_row = sampler.forward
        sampler.forward = self.choose_row

    def sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Sample a step with the addresses of its rows."""
        # No generator is used, and on CPUs vLLM 0.32 fails to rewind the generators of prompts.
        self._runner.input_batch.generators.clear()
        self._step = self._addresses(spec_decode_metadata)
        rejection_sampler.rejection_sample = self.choose_rows
        try:
            return self._sample(logits, spec_decode_metadata)
        finally:
            rejection_sampler.rejection_sample = _STOCK_REJECTION
            self._step = None

    def choose_row(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> Row:
        """Choose the row after the proposed tokens, in place of ``TopKTopPSampler.forward``."""
        if self._step is None:
            # A dummy run, which has no requests.
            self._noise.reserve(logits.shape[1], logits.device)
            stock: Row = self._stock_row(logits, generators, k, p)
            return stock
        logits_BV = apply_top_k_top_p(logits, k, p)
        processed = None
        match self._runner.sampler.logprobs_mode:
            case "processed_logits":
                processed = logits_BV
            case "processed_logprobs":
                processed = logits_BV.log_softmax(dim=-1, dtype=torch.float32)
        return self._noise.choose(logits_BV, self._step.keys_after_proposals()), processed

    def choose_rows(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Choose all rows of a step, in place of ``rejection_sample``."""
        proposed_R, _, most_proposed, _, _, logits_RV, bonus_B1, metadata = arguments
        if self._step is None or metadata.all_greedy:
            stock: torch.Tensor = _STOCK_REJECTION(*arguments, **options)
            return stock
        bonus_B = bonus_B1.view(-1)
        return accept(self._noise, self._step, proposed_R, logits_RV, bonus_B, most_proposed)

    def _addresses(self, metadata: Any) -> StepAddresses:
        batch, requests = self._runner.input_batch, self._runner.requests
        ids = batch.req_ids[: batch.num_reqs]
        sampling = {request_id: requests[request_id].sampling_params for request_id in ids}
        seeds = [seed_of(request_id, params.seed) for request_id, params in sampling.items()]
        temperatures = [temperature_of(params.temperature) for params in sampling.values()]
        proposed = [0] * len(ids) if metadata is None else metadata.num_draft_tokens
        return StepAddresses(
            np.array(seeds, dtype=np.uint64),
            np.array(temperatures, dtype=np.float32),
            np.array(batch.num_tokens_no_spec[: len(ids)], dtype=np.int64),
            np.array(proposed, dtype=np.int64),
        )


def _repair_expansion() -> None:
    """Replace two functions of vLLM 0.32 that fail on CPUs (vllm issue 55005).

    ``expand_batch_to_tokens`` writes into a copy, so temperatures and top-k of rows are
    uninitialised memory; and top-k of no rows fails.
    """

    def expand(
        x: torch.Tensor,
        cu_num_tokens: torch.Tensor,
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
        replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        return replaced.repeat_interleave(counts, output_size=num_tokens)

    def constrain_rows(logits: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return _STOCK_CONSTRAINTS(logits, *arguments) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_sampling_constraints = constrain_rows

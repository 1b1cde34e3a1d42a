"""The worker: vLLM's own, which also gives the proposer its requests and draws coupled tokens."""

from typing import Any

import numpy as np
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from ssd_vllm.coupled import CoupledNoise, StepAddresses, accept, choose_after_proposals
from ssd_vllm.proposer import Proposer, temperature_of
from ssd_vllm.requests import seed_of
from ssd_vllm.settings import read
from ssd_vllm.versions import check_parameters, check_version

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as BaseWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as BaseWorker


class Worker(BaseWorker):  # type: ignore[misc]
    """vLLM's worker of this platform, with a pool of drafts."""

    _proposer: object = None
    """Set by ``load_model``, if the worker has one."""

    def load_model(self, **options: Any) -> None:
        """Load the target, then connect the proposer and the sampler to the steps.

        Raises:
            SetupError: this version of vLLM is not supported.
        """
        check_version(vllm.__version__)
        super().load_model(**options)
        runner = self.model_runner
        check_parameters(
            {
                original_sample(runner): ("logits", "spec_decode_metadata"),
                rejection_sampler.rejection_sample: _REJECTION_PARAMETERS,
                rejection_sampler.expand_batch_to_tokens: ("x", "cu_num_tokens", "num_tokens"),
                runner.sampler.topk_topp_sampler.forward: ("logits", "generators", "k", "p"),
            }
        )
        if current_platform.is_cpu():
            _repair_expansion()
        if read(self.vllm_config.additional_config).sampling == "coupled":
            CoupledSampling(runner)
        self._proposer = getattr(runner, "drafter", None)
        if isinstance(self._proposer, Proposer):
            self._proposer.connect(lambda: runner.input_batch.req_ids)

    def shutdown(self) -> None:
        """End the links too."""
        if isinstance(self._proposer, Proposer):
            self._proposer.links.stop()
        super().shutdown()

    def execute_model(self, scheduler_output: Any) -> Any:
        """Give the proposer the step, then run it."""
        if isinstance(self._proposer, Proposer):
            self._proposer.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)


_REJECTION_PARAMETERS = (
    *("draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens"),
    *("draft_probs", "target_logits", "bonus_token_ids", "sampling_metadata"),
)


Row = tuple[torch.Tensor, torch.Tensor | None]
"""Token ids, and logits or log-probabilities that vLLM returns to the client."""


class CoupledSampling:
    """Replaces the two random choices of a runner of vLLM. The worker's thread.

    Installed for the life of the process: ``rejection_sample`` is a function of a module.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._noise = CoupledNoise()
        self._step: StepAddresses | None = None
        sampler = runner.sampler.topk_topp_sampler
        self._sample = original_sample(runner)
        self._stock_row = sampler.forward
        self._stock_rejection = rejection_sampler.rejection_sample
        runner._sample = self.sample  # noqa: SLF001 see ``original_sample``
        sampler.forward = self.choose_row
        rejection_sampler.rejection_sample = self.choose_rows

    def sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        """Sample a step with the addresses of its rows."""
        self._step = self._addresses(spec_decode_metadata)
        try:
            return self._sample(logits, spec_decode_metadata)
        finally:
            self._step = None

    def choose_row(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> Row:
        """In place of ``TopKTopPSampler.forward``: the row after the proposed tokens."""
        if self._step is None:
            # A dummy run, which has no requests.
            stock: Row = self._stock_row(logits, generators, k, p)
            return stock
        logits_BV = apply_top_k_top_p(logits, k, p)
        processed = None
        match self._runner.sampler.logprobs_mode:
            case "processed_logits":
                processed = logits_BV
            case "processed_logprobs":
                processed = logits_BV.log_softmax(dim=-1, dtype=torch.float32)
        return choose_after_proposals(self._noise, self._step, logits_BV), processed

    def choose_rows(self, *given: Any, **more: Any) -> torch.Tensor:
        """In place of ``rejection_sample``."""
        proposed_R, _, most_proposed, _, _, logits_RV, bonus_B1, metadata = given
        if self._step is None or metadata.all_greedy:
            stock: torch.Tensor = self._stock_rejection(*given, **more)
            return stock
        bonus_B = bonus_B1.view(-1)
        return accept(self._noise, self._step, proposed_R, logits_RV, bonus_B, most_proposed)

    def _addresses(self, metadata: Any) -> StepAddresses:
        batch, requests = self._runner.input_batch, self._runner.requests
        ids = batch.req_ids[: batch.num_reqs]
        sampling = [requests[each].sampling_params for each in ids]
        seeds = [seed_of(each, params.seed) for each, params in zip(ids, sampling, strict=True)]
        temperatures = [temperature_of(params.temperature) for params in sampling]
        proposed = [0] * len(ids) if metadata is None else metadata.num_draft_tokens
        return StepAddresses(
            np.array(seeds, dtype=np.uint64),
            np.array(temperatures, dtype=np.float32),
            np.array(batch.num_tokens_no_spec[: len(ids)], dtype=np.int64),
            np.array(proposed, dtype=np.int64),
        )


def original_sample(runner: Any) -> Any:
    """Return the method of a runner that samples a step; no public one has its arguments."""
    return runner._sample  # noqa: SLF001


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

    constrain = rejection_sampler.apply_sampling_constraints

    def constrain_rows(logits: torch.Tensor, *more: Any) -> torch.Tensor:
        return constrain(logits, *more) if len(logits) else logits

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_sampling_constraints = constrain_rows

"""The proposer that vLLM constructs for ``method: custom_class``.

It has the pool and its links. ``Worker`` calls ``begin_step`` before each step and vLLM ``propose``
after it; both on the worker's thread. Of several ranks, only the first one has links and requests:
the scheduler sends its proposals to all.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd.engine.models.fingerprint import weights_fingerprint
from ssd.errors import SetupError, WeightsError
from ssd.observability.log import RepeatLimit, TextFormatter, get_logger
from ssd.observability.metrics import PROPOSER_CRASHES_TOTAL
from ssd.pool.dialer import LinkDialer
from ssd.pool.handshake import LinkTerms
from ssd.pool.link_thread import LinkThread, doorbell
from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog
from ssd.ports import SystemClock
from ssd.rpc.pool_codec import PoolStatus
from ssd.speculation.controller import Controller
from ssd.speculation.estimates import Calibration
from ssd.text.tokenizer import load_tokenizer
from ssd.text.tokenizer_config import OPTIONAL_FILES
from ssd.types import WIRE_VERSION, Hello, LinkSettings, Mode, OpenSession, Peer, TokenId
from ssd_vllm.metrics_folder import METRICS_FOLDER
from ssd_vllm.pool_server import PoolServer
from ssd_vllm.requests import PoolRequests, Proposals, Request, Step, seed_of
from ssd_vllm.settings import PluginSettings, read
from ssd_vllm.step_control import StepControl

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput

_log = get_logger(__name__)
_CPUS = os.sched_getaffinity(0)
"""CPUs of the process before vLLM pins its threads, since ``Worker`` imports this module."""
_LEAST_TEMPERATURE = 1e-5
"""vLLM selects the largest logit below it."""


class Proposer:
    """The proposer of the module. vLLM calls the constructor, ``load_model`` and ``propose``."""

    def __init__(self, vllm_config: "VllmConfig") -> None:
        """Read the settings; nothing is dialled before ``load_model``.

        Raises:
            SetupError: a setting is wrong, or the tokenizer cannot be read.
        """
        model = vllm_config.model_config
        self.settings: PluginSettings = read(vllm_config.additional_config)
        self.settings.check_drafts()
        tokenizer = load_tokenizer(tokenizer_folder(model))
        num_token_ids = min(tokenizer.vocab_size, model.get_vocab_size())
        lookahead = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = model.max_model_len
        """Maximum length of a text; ``Worker`` changes it."""
        clock = SystemClock()
        self.pool = DraftPool(self.settings, lookahead, num_token_ids, clock)
        self._columns = tuple(range(1, lookahead + 2))
        self._control = control = StepControl(
            Controller(self._columns, lookahead),
            Mode(self.settings.mode),
            lookahead,
            RoundLog(),
            clock,
        )
        self.requests = PoolRequests(self.pool, control, num_token_ids)
        hello = Hello(
            wire_version=WIRE_VERSION,
            vocab_size=num_token_ids,
            tokenizer_fingerprint=tokenizer.fingerprint,
            lookahead=lookahead,
            branches=self.settings.branches,
            epoch=0,
            peer=Peer(pod=f"{socket.gethostname()}:{os.getpid()}"),
        )
        self.server = PoolServer(
            self.settings,
            admin_port(self.settings, vllm_config.parallel_config),
            self.pool,
            control,
            identity(model),
            partial(
                LinkDialer,
                self.pool,
                self.settings.drafts,
                hello,
                LinkSettings(fan_out_policy=self.settings.fan_out),
                terms=LinkTerms(credentials=self.settings.link_credentials(), doorbell=doorbell),
            ),
        )
        self.links = LinkThread(self.server.run, _CPUS)
        self._row_ids: Callable[[], Sequence[str]] | None = None
        self._is_first_rank = False
        self._has_crashed = False
        log_to_stderr()

    def connect(self, row_ids: Callable[[], Sequence[str]]) -> None:
        """Set the function that returns the requests of the rows of the batch. ``Worker``."""
        self._row_ids = row_ids

    def calibrate(self, calibration: Calibration) -> None:
        """Set the start values of the times of steps, before the first one. ``Worker``."""
        lookahead = self._columns[-1] - 1
        self._control.use(Controller(self._columns, lookahead, calibration))

    def load_model(self, _target_model: Any = None) -> None:
        """Dial the drafts on the first rank, after the target is loaded."""
        self._is_first_rank = is_first_rank()
        if self._is_first_rank:
            if METRICS_FOLDER not in os.environ:  # noqa: TID251 a variable of vLLM
                _log.info("metrics_not_served", needed=METRICS_FOLDER)
            self.links.start()

    def begin_step(self, step: "SchedulerOutput") -> None:
        """Add the requests that begin, remove those that end, and open sessions."""
        if not self._is_first_rank:
            return
        try:
            self._begin_step(step)
        except Exception as error:  # noqa: BLE001 a bug here must not end the server
            self._recover(error)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[TokenId]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: object = None,  # noqa: ARG002 vLLM gives it
    ) -> Proposals:
        """Return the proposals of each row of the batch; see ``PoolRequests.propose``."""
        if not self._is_first_rank:
            return [[] for _ in sampled_token_ids]
        try:
            if self._row_ids is None:
                raise SetupError("vLLM runs without --worker-cls ssd_vllm.Worker")
            return self.requests.propose(
                self._row_ids(),
                sampled_token_ids,
                num_tokens_no_spec[: len(sampled_token_ids)].tolist(),
                token_ids_cpu,
            )
        except Exception as error:  # noqa: BLE001 likewise
            self._recover(error)
            return [[] for _ in sampled_token_ids]

    def _begin_step(self, step: "SchedulerOutput") -> None:
        for request_id in step.finished_req_ids:
            self.requests.end(request_id)
        for new in step.scheduled_new_reqs:
            # A draft does not know embeddings and images, whose tokens only keep their places.
            has_text = new.prompt_token_ids is not None and not new.mm_features
            if new.sampling_params is not None and has_text and new.prompt_embeds is None:
                self._begin(new.req_id, new.prompt_token_ids, new.sampling_params, new.lora_request)
        proposed = step.scheduled_spec_decode_tokens
        counts = {
            request_id: sum(token >= 0 for token in tokens)
            for request_id, tokens in proposed.items()
        }
        scheduled = step.num_scheduled_tokens
        # vLLM fills some proposals with -1.
        num_rows = len(scheduled) + sum(map(len, proposed.values()))
        self.requests.begin_step(
            Step(
                running=scheduled.keys(),
                num_proposed=counts,
                preempted=step.preempted_req_ids or (),
                prompt_tokens=sum(scheduled.values()) - num_rows,
            )
        )

    def _begin(
        self,
        request_id: str,
        prompt_ids: Sequence[TokenId],
        sampling: "SamplingParams",
        lora: "LoRARequest | None",
    ) -> None:
        if lora is not None or sampling.thinking_token_budget is not None:
            # A draft has the tokens of the base model. vLLM 0.32 forces the ends of thinking at
            # other tokens where the text has a proposal.
            return
        most = self.max_model_len if sampling.max_tokens is None else sampling.max_tokens
        # Noise changes no choice where a filter keeps one token. vLLM allows no top-p of 0, and
        # no min-p with speculation.
        has_noise = self.settings.sampling == "coupled" and sampling.top_k != 1
        self.requests.begin(
            Request(
                request_id=request_id,
                opening=OpenSession(
                    token_ids=tuple(prompt_ids),
                    max_len=min(self.max_model_len, len(prompt_ids) + most),
                    seed=seed_of(request_id, sampling.seed),
                    # 0 also where the draft cannot foresee the noise.
                    temperature=temperature_of(sampling.temperature) if has_noise else 0.0,
                    # In vLLM, -1 also means all tokens.
                    top_k=max(0, sampling.top_k),
                ),
                ending_ids=() if sampling.ignore_eos else sampling.all_stop_token_ids,
                min_len=len(prompt_ids) + sampling.min_tokens if sampling.min_tokens else 0,
            )
        )

    def _recover(self, error: Exception) -> None:
        """Count a bug and log the first; the requests that run continue without proposals."""
        if not self._has_crashed:
            _log.exception("proposer_crashed", error=repr(error))
        self._has_crashed = True
        PROPOSER_CRASHES_TOTAL.inc()
        try:
            self.requests.reset()
        except Exception as second:  # noqa: BLE001 likewise
            _log.exception("proposer_crashed", error=repr(second))


def admin_port(settings: PluginSettings, parallel: Any) -> int:
    """Return the port of this replica; 0: none."""
    # The rank is 0 in each replica of a model without experts.
    return settings.admin_port and settings.admin_port + int(parallel.data_parallel_index)


def identity(model: Any) -> PoolStatus:
    """Return what the status reports of the target's model."""
    folder, fingerprint = Path(model.model), ""
    if folder.is_dir():
        # Formats without safetensors have none.
        with contextlib.suppress(WeightsError):
            fingerprint = weights_fingerprint(folder)
    dtype = str(model.dtype).removeprefix("torch.")
    return PoolStatus(weights_fingerprint=fingerprint, dtype=dtype, dtype_reason="dtype of vLLM")


def is_first_rank() -> bool:
    """Whether this worker is the one whose proposals vLLM reads."""
    from vllm.distributed.parallel_state import get_tp_group  # noqa: PLC0415 tests have no vLLM

    return bool(get_tp_group().is_first_rank)


def log_to_stderr() -> None:
    """Write the log lines of this package and its library; vLLM configures only its own."""
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter("ssd_vllm"))
    handler.addFilter(RepeatLimit())
    for package in ("ssd", "ssd_vllm"):
        logger = logging.getLogger(package)
        if not logger.handlers:
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            logger.propagate = False


def temperature_of(temperature: float) -> float:
    """Return the temperature that drafts use."""
    return temperature if temperature >= _LEAST_TEMPERATURE else 0.0


def tokenizer_folder(model: Any) -> Path:
    """Return the folder of the tokenizer of vLLM's ``ModelConfig``.

    It is a path, or an entry of the hub, which is fetched unless vLLM has done so. If the hub does
    not answer, the files beside ``tokenizer.json`` that are not in the cache are left out, with a
    warning. If the hub has them, the fingerprint is another one, and drafts refuse the link.

    Raises:
        SetupError: there is no ``tokenizer.json``, or it cannot be fetched.
    """
    if Path(model.tokenizer).is_dir():
        return Path(model.tokenizer)
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 only for names of the hub
    from huggingface_hub.errors import (  # noqa: PLC0415 likewise
        EntryNotFoundError,
        LocalEntryNotFoundError,
    )

    revision, token = model.tokenizer_revision, model.hf_token
    try:
        file = hf_hub_download(model.tokenizer, "tokenizer.json", revision=revision, token=token)
        # The configuration of the model has the number of embeddings.
        for name in (*OPTIONAL_FILES, "config.json"):
            # vLLM's tokenizer has normally fetched those that exist, and the hub is not needed.
            try:
                hf_hub_download(model.tokenizer, name, revision=revision, token=token)
            except EntryNotFoundError as error:
                if isinstance(error, LocalEntryNotFoundError):
                    _log.warning("tokenizer_file_unavailable", file=name, reason=str(error))
    except (OSError, ValueError, EntryNotFoundError) as error:
        message = f"the tokenizer {model.tokenizer} cannot be fetched: {error}"
        raise SetupError(message) from error
    return Path(file).parent

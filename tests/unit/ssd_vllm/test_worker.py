"""The worker and its sampling, between fakes of vLLM's classes."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.ssd_vllm.fake_vllm import STOCK_ROW, STOCK_ROWS, Calls, modules

import ssd_vllm
from ssd.errors import SettingsError, SetupError
from ssd.speculation.estimates import Calibration
from ssd.speculation.noise import gumbel_noise
from ssd_vllm.proposer import Proposer
from ssd_vllm.requests import seed_of

VOCAB = 8
MAX_LEN = 64
LOOKAHEAD = 6
Import = Callable[..., ModuleType]


@pytest.fixture
def calls() -> Calls:
    return []


@pytest.fixture
def import_worker(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> Import:
    """Imports the module with vLLM's fakes; afterwards it is gone."""

    def imported(**vllm: Any) -> ModuleType:
        for name, module in modules(calls, **vllm).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "ssd_vllm.worker", raising=False)
        monkeypatch.setattr(ssd_vllm, "worker", None, raising=False)
        found = importlib.import_module("ssd_vllm.worker")
        monkeypatch.setitem(sys.modules, "ssd_vllm.worker", found)
        return found

    return imported


class RecordingProposer(Proposer):
    """A proposer without links."""

    def __init__(self, calls: Calls) -> None:
        self.links: Any = SimpleNamespace(stop=lambda: calls.append(("stop",)))
        self._calls = calls

    def begin_step(self, step: Any) -> None:
        self._calls.append(("begin_step", step))

    def calibrate(self, calibration: Calibration) -> None:
        self._calls.append(("calibrate", calibration))


def parallel(*, stages: int = 1, replicas: int = 1, backend: str = "mp") -> Any:
    return SimpleNamespace(
        world_size=2 * stages,
        tensor_parallel_size=2,
        pipeline_parallel_size=stages,
        data_parallel_size=replicas,
        distributed_executor_backend=backend,
    )


def config(*, plugin: Any = None, speculative: Any = "ssd_vllm.Proposer", **values: Any) -> Any:
    method = SimpleNamespace(method="eagle" if plugin else "custom_class", model=speculative)
    default = {
        "additional_config": {"ssd": plugin or {}},
        "speculative_config": speculative and method,
        "use_v2_model_runner": False,
        "scheduler_config": SimpleNamespace(max_num_seqs=4),
        "parallel_config": parallel(),
    }
    return SimpleNamespace(**default | values)


@dataclass
class Sampling:
    """Of a step, as far as log-probabilities are concerned."""

    max_num_logprobs: int | None
    logprob_token_ids: dict[int, list[int]] | None


def top_logprobs(logprobs_RV: torch.Tensor, count: int, token_ids_R: torch.Tensor) -> Any:
    """Of the token of each row, and of the most probable ones."""
    values, ids = logprobs_RV.topk(count)
    ids = torch.cat([token_ids_R[:, None], ids], dim=1)
    values = torch.cat([logprobs_RV.gather(1, token_ids_R[:, None]), values], dim=1)
    return SimpleNamespace(logprob_token_ids=ids.int(), logprobs=values)


@dataclass
class Runner:
    """A runner of vLLM with some requests."""

    num_reqs: int
    seeds: tuple[int | None, ...] = (5, 5, 5)
    temperatures: tuple[float, ...] = (1.0, 1.0, 1.0)
    logprobs_mode: str = "raw_logprobs"
    drafter: Any = None
    max_model_len: int = MAX_LEN
    max_num_tokens: int = 64
    num_spec_tokens: int = LOOKAHEAD
    num_rows: list[int] = field(default_factory=list)
    """Of the passes without requests."""
    steps: list[Any] = field(default_factory=list)
    """Of the passes with requests."""
    effective_drafter_max_model_len: int = MAX_LEN
    sampled: Any = None
    """What ``_sample`` calls."""

    def __post_init__(self) -> None:
        ids = ["a", "b", "c", None]
        self.input_batch = SimpleNamespace(
            req_ids=ids,
            num_reqs=self.num_reqs,
            # Rows of the batch that are not in use have old values.
            num_tokens_no_spec=np.array([10, 20, 30, 99]),
            generators={0: torch.Generator()},
        )
        self.requests = {
            name: SimpleNamespace(sampling_params=SimpleNamespace(seed=seed, temperature=each))
            for name, seed, each in zip(ids, self.seeds, self.temperatures, strict=False)
        }
        topk_topp_sampler = SimpleNamespace(forward=lambda *_: STOCK_ROW)
        self.sampler = SimpleNamespace(
            topk_topp_sampler=topk_topp_sampler, logprobs_mode=self.logprobs_mode
        )

        self.sampler.gather_logprobs = top_logprobs
        self.rejection_sampler = SimpleNamespace(sampler=self.sampler, forward=self._reject)
        self.lora_config = SimpleNamespace()
        self._num_adapted = 0
        self.model = SimpleNamespace(compute_logits=self._compute_logits)

    def _reject(self, metadata: Any, _probs: Any, logits_RV: torch.Tensor, sampling: Any) -> Any:
        """As vLLM 0.32, which fails with ids that a request gives."""
        assert not sampling.logprob_token_ids
        if sampling.max_num_logprobs is None:
            return None
        return self.sampler.gather_logprobs(
            logits_RV, sampling.max_num_logprobs, torch.zeros(len(logits_RV), dtype=torch.int64)
        )

    def execute_model(self, step: Any, _tensors: Any = None) -> Any:
        self.steps.append(step)
        return "output"

    def _sample(self, logits: Any, metadata: Any) -> Any:
        return self.sampled(logits, metadata)

    def _dummy_run(self, rows: int, *, skip_eplb: bool) -> tuple[torch.Tensor, None]:
        assert skip_eplb, "nothing is counted"
        self.num_rows.append(rows)
        # One row of each request.
        self._num_adapted = min(rows, self.num_reqs)
        return torch.zeros((rows, 2)), None

    @contextmanager
    def maybe_select_dummy_loras(self, lora_config: Any, counts: np.ndarray) -> Iterator[None]:
        assert lora_config is self.lora_config
        self._num_adapted = len(counts)
        yield

    def _compute_logits(self, hidden_RD: torch.Tensor) -> None:
        """As on ranks that do not have the logits."""
        assert len(hidden_RD) == self._num_adapted, "each row has its adapter"


def logits(num_rows: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((num_rows, VOCAB), generator=torch.Generator().manual_seed(seed))


def chosen(row_V: torch.Tensor, seed: int, position: int) -> int:
    return int(np.argmax(row_V.numpy() + gumbel_noise(seed, [position], VOCAB)[0]))


def test_without_proposals_each_row_is_the_choice_at_its_position(
    import_worker: Import, calls: Calls
) -> None:
    runner = Runner(num_reqs=3, seeds=(5, None, 2**64 + 6), temperatures=(1.0, 1.0, 1e-6))
    logits_BV = logits(3)
    runner.sampled = lambda rows, _: runner.sampler.topk_topp_sampler.forward(rows, {}, "k", "p")
    import_worker().CoupledSampling(runner)
    token_B, returned = runner._sample(logits_BV, None)
    expected = [chosen(logits_BV[0], 5, 10), chosen(logits_BV[1], seed_of("b", None), 20)]
    assert token_B.tolist() == [*expected, int(logits_BV[2].argmax())]
    assert returned is None
    assert calls == [("filters", "k", "p")]


def test_proposed_tokens_are_accepted_while_they_are_the_choices(import_worker: Import) -> None:
    module = import_worker()
    runner = Runner(num_reqs=2)
    target_3V, bonus_2V = logits(3), logits(2, seed=2)
    choices = [chosen(target_3V[row], 5, position) for row, position in enumerate((10, 11, 20))]
    proposed_3 = torch.tensor([*choices[:2], 1 - min(choices[2], 1)], dtype=torch.int32)
    assert proposed_3[2] != choices[2]

    def sampled(_logits: Any, metadata: Any) -> torch.Tensor:
        bonus_2, _ = runner.sampler.topk_topp_sampler.forward(bonus_2V, {}, None, None)
        rows: torch.Tensor = module.rejection_sampler.rejection_sample(
            *(proposed_3, metadata.num_draft_tokens, 2, None, None, target_3V, bonus_2[:, None]),
            SimpleNamespace(all_greedy=False),
        )
        return rows

    runner.sampled = sampled
    module.CoupledSampling(runner)
    found = runner._sample(None, SimpleNamespace(num_draft_tokens=[2, 1]))
    assert found.tolist() == [[*choices[:2], chosen(bonus_2V[0], 5, 12)], [choices[2], -1, -1]]


@pytest.mark.parametrize("mode", ["processed_logits", "processed_logprobs"])
def test_processed_values_are_returned_without_noise(import_worker: Import, mode: str) -> None:
    runner = Runner(num_reqs=1, logprobs_mode=mode)
    runner.sampled = lambda rows, _: runner.sampler.topk_topp_sampler.forward(rows, {}, None, None)
    import_worker().CoupledSampling(runner)
    logits_BV = logits(1)
    _, returned = runner._sample(logits_BV, None)
    expected = logits_BV if mode == "processed_logits" else logits_BV.log_softmax(dim=-1)
    torch.testing.assert_close(returned, expected)


def test_rejection_in_greedy_batches_and_in_dummy_runs_is_vllms_own(
    import_worker: Import, calls: Calls
) -> None:
    module = import_worker()
    runner = Runner(num_reqs=1)
    module.CoupledSampling(runner)
    given = (None,) * 7
    greedy, warm = (SimpleNamespace(all_greedy=each) for each in (True, False))
    sampler = module.rejection_sampler
    runner.sampled = lambda *_: sampler.rejection_sample(*given, greedy, synthetic_mode=True)
    assert runner._sample(None, SimpleNamespace(num_draft_tokens=[1])) is STOCK_ROWS
    assert sampler.rejection_sample(*given, warm) is STOCK_ROWS
    assert calls == [("rejection_sample", True), ("rejection_sample", False)]


def test_a_dummy_run_reserves_the_memory_of_the_noise(
    import_worker: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_worker()
    reserved: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(
        module.CoupledNoise, "reserve", lambda _self, *given: reserved.append(given)
    )
    runner = Runner(num_reqs=0)
    module.CoupledSampling(runner)
    forward = runner.sampler.topk_topp_sampler.forward
    assert forward(logits(3), {}, None, None) is STOCK_ROW
    assert reserved == [(VOCAB, torch.device("cpu"))]


def test_two_engines_of_a_process_choose_for_their_own_requests(import_worker: Import) -> None:
    module = import_worker()
    sampler = module.rejection_sampler
    first, second = Runner(num_reqs=1), Runner(num_reqs=1, seeds=(7,))
    for runner in (first, second):
        module.CoupledSampling(runner)
    target_1V = logits(1)
    given = (torch.tensor([1]), [1], 1, None, None, target_1V, torch.tensor([[2]]))
    warm = SimpleNamespace(all_greedy=False)
    for runner, seed in ((first, 5), (second, 7)):
        runner.sampled = lambda *_: sampler.rejection_sample(*given, warm)
        found = runner._sample(None, SimpleNamespace(num_draft_tokens=[1]))
        choice = chosen(target_1V[0], seed, 10)
        assert found.tolist() == [[choice, 2 if choice == 1 else -1]]


def test_a_failed_step_leaves_no_addresses_and_no_generators(import_worker: Import) -> None:
    runner = Runner(num_reqs=1)
    runner.sampled = lambda *_: 1 / 0
    module = import_worker()
    stock = module.rejection_sampler.rejection_sample
    sampling = module.CoupledSampling(runner)
    with pytest.raises(ZeroDivisionError):
        runner._sample(None, None)
    assert sampling._step is None
    assert module.rejection_sampler.rejection_sample is stock
    assert runner.input_batch.generators == {}


def test_the_worker_connects_the_proposer_after_the_model(
    import_worker: Import, calls: Calls
) -> None:
    proposer = RecordingProposer(calls)
    runner = Runner(num_reqs=2, drafter=proposer)
    worker = import_worker().Worker(config(), runner)
    worker.load_model(load_dummy_weights=True)
    assert calls == [("load_model", {"load_dummy_weights": True})]
    assert proposer._row_ids is not None
    assert list(proposer._row_ids()) == ["a", "b", "c", None]
    assert runner.effective_drafter_max_model_len == MAX_LEN + LOOKAHEAD
    worker.update_max_model_len(32)
    assert runner.effective_drafter_max_model_len == 32 + LOOKAHEAD
    assert proposer.max_model_len == 32
    assert worker.execute_model("step") == "output"
    # An executor of vLLM for Ray calls the runner, not the worker.
    assert runner.execute_model("next") == "output"
    assert calls[1:] == [("begin_step", "step"), ("begin_step", "next")]
    assert runner.steps == ["step", "next"]


def test_settings_of_the_plugin_are_not_in_the_key_of_the_compiled_graphs(
    import_worker: Import, calls: Calls
) -> None:
    given = config()
    given.additional_config["other"] = 1
    worker = import_worker().Worker(given, Runner(num_reqs=1, drafter=RecordingProposer(calls)))
    for _ in range(2):
        worker.load_model()
        assert given.additional_config == {"other": 1}


@pytest.mark.parametrize("num_top", [None, 1, 4])
def test_a_request_gets_the_log_probabilities_of_the_ids_that_it_gives(
    import_worker: Import, calls: Calls, num_top: int | None
) -> None:
    """The second of three requests, each with two rows."""
    runner = Runner(num_reqs=3, drafter=RecordingProposer(calls))
    import_worker().Worker(config(), runner).load_model()
    logprobs_RV, metadata = logits(6), SimpleNamespace(num_draft_tokens=[1, 0, 1])
    forward = runner.rejection_sampler.forward
    found = forward(metadata, None, logprobs_RV, Sampling(num_top, {1: [5, 2]}))
    stock = top_logprobs(logprobs_RV, max(num_top or 0, 2), torch.zeros(6, dtype=torch.int64))
    for row in range(6):
        ids = stock.logprob_token_ids[row].tolist()
        if row in (2, 3):
            ids[1:3] = [5, 2]
        assert found.logprob_token_ids[row].tolist() == ids
        assert found.logprobs[row].tolist() == logprobs_RV[row, ids].tolist()
    assert forward(metadata, None, logprobs_RV, Sampling(None, None)) is None
    assert runner.sampler.gather_logprobs is top_logprobs


def test_all_ranks_run_the_passes_that_the_first_one_has_time_for(
    import_worker: Import, calls: Calls
) -> None:
    runner = Runner(num_reqs=0, drafter=RecordingProposer(calls), num_spec_tokens=1)
    worker = import_worker().Worker(config(), runner)
    worker.load_model()
    assert worker.compile_or_warm_up_model() == "warm"
    assert runner.num_rows == [1, 2]
    seconds = {(columns, size): 1.0 for columns in (1, 2) for size in (1, 2, 4)}
    assert calls[1:] == [("warm_up",), ("calibrate", Calibration(seconds))]


def test_replicas_are_not_measured(import_worker: Import, calls: Calls) -> None:
    runner = Runner(num_reqs=0, drafter=RecordingProposer(calls))
    worker = import_worker().Worker(config(parallel_config=parallel(replicas=2)), runner)
    worker.load_model()
    worker.compile_or_warm_up_model()
    assert runner.num_rows == []
    assert calls[1:] == [("warm_up",)]


def test_the_worker_runs_without_speculation(import_worker: Import, calls: Calls) -> None:
    runner = Runner(num_reqs=1)
    stages = config(speculative=None, parallel_config=parallel(stages=2))
    worker = import_worker().Worker(stages, runner)
    worker.load_model()
    worker.compile_or_warm_up_model()
    worker.update_max_model_len(32)
    worker.execute_model("step")
    worker.shutdown()
    assert [name for name, *_ in calls] == ["load_model", "warm_up", "shutdown"]
    assert runner.steps == ["step"]
    assert runner.effective_drafter_max_model_len == MAX_LEN


@pytest.mark.parametrize("sampling", ["coupled", "stock"])
def test_the_setting_selects_whose_choices_are_used(
    import_worker: Import, calls: Calls, sampling: str
) -> None:
    module = import_worker()
    runner = Runner(num_reqs=1, drafter=RecordingProposer(calls))
    stock_row = runner.sampler.topk_topp_sampler.forward
    worker = module.Worker(config(additional_config={"ssd": {"sampling": sampling}}), runner)
    worker.load_model()
    assert (runner.sampler.topk_topp_sampler.forward is stock_row) is (sampling == "stock")
    worker.shutdown()
    assert calls[-2:] == [("stop",), ("shutdown",)]


@pytest.mark.parametrize("sampling", ["coupled", "stock"])
def test_each_thinking_of_a_text_can_be_ended(
    import_worker: Import, calls: Calls, sampling: str
) -> None:
    runner = Runner(num_reqs=1, drafter=RecordingProposer(calls))
    given = config(additional_config={"ssd": {"sampling": sampling}})
    import_worker().Worker(given, runner).load_model()
    state = {"bonus_token_forced": True}
    runner.input_batch.thinking_budget_state_holder = SimpleNamespace(_state={0: state})
    runner.sampled = lambda *_: state["bonus_token_forced"]
    assert runner._sample(None, SimpleNamespace(num_draft_tokens=[0])) is False


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        (
            {"speculative": "org/eagle", "plugin": {"drafts": ["a:1"]}},
            SetupError,
            "speculative_config with ea",
        ),
        ({"use_v2_model_runner": True}, SetupError, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"parallel_config": parallel(backend="external_launcher")}, SetupError, "external_launch"),
        ({"parallel_config": parallel(stages=2)}, SetupError, "pipeline_parallel_size"),
        ({"additional_config": {"ssd": {"sampling": "other"}}}, SettingsError, "sampling"),
    ],
)
def test_what_it_cannot_serve_exactly_ends_the_start(
    import_worker: Import,
    calls: Calls,
    values: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    worker = import_worker().Worker(config(**values), Runner(num_reqs=1))
    with pytest.raises(error, match=message):
        worker.load_model()
    assert calls == [], "before the model is loaded"


def test_another_version_of_vllm_ends_the_start_before_its_names_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.33.1", raising=False)
    monkeypatch.delitem(sys.modules, "ssd_vllm.worker", raising=False)
    with pytest.raises(SetupError, match=r"supports vLLM 0\.32, found 0\.33\.1"):
        _ = ssd_vllm.Worker
    assert "ssd_vllm.worker" not in sys.modules


def test_a_changed_function_of_vllm_ends_the_start(import_worker: Import, calls: Calls) -> None:
    module = import_worker()
    module._USED[lambda self, rows: None] = ("self", "logits")
    with pytest.raises(SetupError, match="has the parameters self, rows; expected self, logits"):
        module.Worker(config(), Runner(num_reqs=1)).load_model()
    assert calls == []


def test_on_cpus_values_of_requests_reach_their_rows(import_worker: Import, calls: Calls) -> None:
    module = import_worker()
    module.Worker(config(), Runner(num_reqs=1)).load_model()
    sampler = module.rejection_sampler
    temperature_3 = torch.tensor([0.5, 0.0, 2.0])
    found = sampler.expand_batch_to_tokens(temperature_3, torch.tensor([2, 3, 3]), 3, 0, 1)
    assert found.tolist() == [0.5, 0.5, 1.0]
    assert temperature_3.tolist() == [0.5, 0.0, 2.0]
    none_0V = torch.zeros((0, VOCAB))
    assert sampler.apply_sampling_constraints(none_0V, None, None) is none_0V
    assert sampler.apply_sampling_constraints(torch.ones((1, 1)), None, None).item() == 0.5
    assert calls[1:] == [("constraints", 1)]


def test_on_gpus_vllms_functions_stay(import_worker: Import) -> None:
    module = import_worker(is_cpu=False)
    stock = module.rejection_sampler.expand_batch_to_tokens
    module.Worker(config(), Runner(num_reqs=1)).load_model()
    assert module.rejection_sampler.expand_batch_to_tokens is stock

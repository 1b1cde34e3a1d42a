"""What the proposer makes of vLLM's objects, and what it does on other ranks and after a bug."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

from ssd import demo
from ssd.errors import SetupError
from ssd.observability.metrics import PROPOSER_CRASHES_TOTAL
from ssd.speculation.estimates import Calibration
from ssd_vllm import proposer
from ssd_vllm.proposer import Proposer, admin_port, tokenizer_folder
from ssd_vllm.requests import Proposals, Request, Step

LOOKAHEAD = 6

MODEL = demo.folder("demo://target")
MakeProposer = Callable[..., Any]


class RecordingRequests:
    """Keeps what it is given; fails if it is told to."""

    def __init__(self) -> None:
        self.begun: list[Request] = []
        self.ended: list[str] = []
        self.steps: list[Step] = []
        self.num_resets = 0
        self.error: Exception | None = None
        self.reset_error: Exception | None = None

    def begin(self, new: Request) -> None:
        self.begun.append(new)

    def end(self, request_id: str) -> None:
        self.ended.append(request_id)

    def begin_step(self, step: Step) -> None:
        if self.error:
            raise self.error
        self.steps.append(step)

    def propose(self, *_arguments: object) -> Proposals:
        if self.error:
            raise self.error
        return [[1]]

    def reset(self) -> None:
        self.num_resets += 1
        if self.reset_error:
            raise self.reset_error


def config(**settings: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(MODEL),
            tokenizer=str(MODEL),
            dtype=torch.float32,
            get_vocab_size=lambda: 4096,
            max_model_len=64,
        ),
        # vLLM resets the rank of replicas of a dense model.
        parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_index=2),
        speculative_config=SimpleNamespace(num_speculative_tokens=LOOKAHEAD),
        additional_config={"ssd": {"drafts": ["127.0.0.1:1"], **settings}},
    )


def sampling(**values: Any) -> Any:
    default = {
        "temperature": 1.0,
        "top_k": -1,
        "seed": 3,
        "max_tokens": None,
        "ignore_eos": False,
        "min_tokens": 0,
        "thinking_token_budget": None,
        "all_stop_token_ids": {9},
    }
    return SimpleNamespace(**default | values)


def step(*new: Any, **values: Any) -> Any:
    default: dict[str, Any] = {
        "finished_req_ids": set(),
        "scheduled_new_reqs": list(new),
        "scheduled_spec_decode_tokens": {},
        "num_scheduled_tokens": {},
        "preempted_req_ids": None,
    }
    return SimpleNamespace(**default | values)


def new(name: str, params: Any, lora: Any = None, **values: Any) -> Any:
    default = {"prompt_token_ids": [1, 2], "prompt_embeds": None, "mm_features": []}
    return SimpleNamespace(
        req_id=name, sampling_params=params, lora_request=lora, **default | values
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeProposer:
    def made(*, is_first: bool = True, **settings: Any) -> Proposer:
        monkeypatch.setattr(proposer, "is_first_rank", lambda: is_first)
        monkeypatch.setattr(proposer, "log_to_stderr", lambda: None)
        found = Proposer(config(**settings))
        monkeypatch.setattr(found.links, "start", lambda: None)
        found.requests = RecordingRequests()  # type: ignore[assignment]
        found.load_model()
        found.connect(lambda: ["a"])
        return found

    return made


def propose(found: Proposer) -> Proposals:
    return found.propose([[5]], np.array([3, 0]), np.zeros((2, 64), dtype=np.int32))


def test_requests_of_a_step_begin_with_their_seed_and_limits(make: MakeProposer) -> None:
    found = make()
    found.begin_step(
        step(
            new("a", sampling(top_k=20, min_tokens=4)),
            new("greedy", sampling(temperature=1e-6, max_tokens=10, ignore_eos=True)),
            new("lora", sampling(), lora=object()),
            new("budget", sampling(thinking_token_budget=0)),
            new("pooling", None),
            new("embeddings", sampling(), prompt_token_ids=None, prompt_embeds=object()),
            new("some embeddings", sampling(), prompt_embeds=object()),
            new("image", sampling(), mm_features=[object()]),
            finished_req_ids={"old"},
            num_scheduled_tokens={"a": 3, "c": 7},
            scheduled_spec_decode_tokens={"a": [1, 2]},
            preempted_req_ids={"b"},
        )
    )
    assert found.requests.ended == ["old"]
    first, second = found.requests.begun
    a, greedy = first.opening, second.opening
    assert (first.request_id, a.seed, a.temperature, a.max_len) == ("a", 3, 1.0, 64)
    assert (a.top_k, greedy.top_k) == (20, 0)
    assert set(first.ending_ids) == {9}
    assert (first.min_len, second.min_len) == (2 + 4, 0)
    assert (greedy.temperature, greedy.max_len, tuple(second.ending_ids)) == (0.0, 12, ())
    (noted,) = found.requests.steps
    assert (set(noted.running), noted.num_proposed) == ({"a", "c"}, {"a": 2})
    assert (noted.preempted, noted.prompt_tokens) == ({"b"}, 6)


@pytest.mark.parametrize(("top_k", "temperature"), [(2, 1.0), (1, 0.0)])
def test_a_draft_adds_no_noise_if_a_filter_keeps_one_token(
    make: MakeProposer, top_k: int, temperature: float
) -> None:
    found = make()
    found.begin_step(step(new("a", sampling(top_k=top_k))))
    (begun,) = found.requests.begun
    assert begun.opening.temperature == temperature


def test_with_the_stock_rule_drafts_propose_the_most_probable_tokens(make: MakeProposer) -> None:
    found = make(sampling="stock")
    found.begin_step(step(new("a", sampling())))
    assert found.requests.begun[0].opening.temperature == 0.0


def test_a_bug_costs_the_proposals_and_nothing_else(
    make: MakeProposer, caplog: pytest.LogCaptureFixture
) -> None:
    found = make()
    before = PROPOSER_CRASHES_TOTAL._value.get()
    requests = found.requests
    assert propose(found) == [[1]]
    requests.error = RuntimeError("a bug")
    found.begin_step(step())
    assert propose(found) == [[]]
    assert requests.num_resets == 2
    assert PROPOSER_CRASHES_TOTAL._value.get() == before + 2
    assert caplog.text.count("proposer_crashed") == 1
    requests.error = None
    assert propose(found) == [[1]]


def test_a_bug_in_the_reset_does_not_reach_the_engine(make: MakeProposer) -> None:
    found = make()
    found.requests.error = found.requests.reset_error = RuntimeError("a bug")
    assert propose(found) == [[]]


def test_rows_that_cannot_be_read_do_not_reach_the_engine(make: MakeProposer) -> None:
    found = make()
    assert found.propose([[5]], None, None) == [[]]


def test_tokens_that_a_grammar_has_invalidated_are_not_proposed(make: MakeProposer) -> None:
    found = make()
    proposed = {"a": [1, -1, -1]}
    found.begin_step(step(scheduled_spec_decode_tokens=proposed, num_scheduled_tokens={"a": 4}))
    (noted,) = found.requests.steps
    assert (noted.num_proposed, noted.prompt_tokens) == ({"a": 1}, 0)


def test_with_measured_times_the_first_proposals_have_the_best_length(make: MakeProposer) -> None:
    found = make()
    assert found._control.controller.choose(8).max_proposed == LOOKAHEAD
    times = {(columns, 8): float(columns) for columns in range(1, LOOKAHEAD + 2)}
    found.calibrate(Calibration(times))
    assert found._control.controller.choose(8).max_proposed == 1


def test_each_replica_has_a_port(make: MakeProposer) -> None:
    assert admin_port(make(admin_port=9000).settings, config().parallel_config) == 9002
    assert admin_port(make().settings, config().parallel_config) == 0


def test_a_tokenizer_of_the_hub_has_the_revision_of_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def download(name: str, file: str, **options: Any) -> str:
        asked.append((name, file, options))
        if file == "added_tokens.json":
            raise EntryNotFoundError("404")
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model = SimpleNamespace(tokenizer="org/model", tokenizer_revision="abc", hf_token="secret")
    assert tokenizer_folder(model) == tmp_path
    files = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    assert {file for _, file, _ in asked} == {*files, "added_tokens.json", "config.json"}
    options = {"revision": "abc", "token": "secret"}
    assert all(each[::2] == ("org/model", options) for each in asked)
    assert caplog.text == "", "the hub does not have the file"


def test_a_file_of_the_tokenizer_that_cannot_be_fetched_is_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def download(_name: str, file: str, **_options: Any) -> str:
        if file == "added_tokens.json":
            raise LocalEntryNotFoundError("the hub does not answer")
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model = SimpleNamespace(tokenizer="org/model", tokenizer_revision=None, hf_token=None)
    assert tokenizer_folder(model) == tmp_path
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == ("WARNING", "tokenizer_file_unavailable")
    fields = {"file": "added_tokens.json", "reason": "the hub does not answer"}
    assert record.__dict__["fields"] == fields


def test_a_tokenizer_that_the_hub_does_not_have_ends_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def download(*_name: str, **_options: Any) -> str:
        raise EntryNotFoundError("404")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    model = SimpleNamespace(tokenizer="org/model", tokenizer_revision=None, hf_token=None)
    with pytest.raises(SetupError, match="org/model cannot be fetched: 404"):
        tokenizer_folder(model)


def test_other_ranks_have_no_requests(make: MakeProposer) -> None:
    found = make(is_first=False)
    found.begin_step(step(new("a", sampling())))
    assert propose(found) == [[]]
    assert found.requests.begun == []


def test_a_worker_of_vllm_gets_no_proposals(make: MakeProposer) -> None:
    found = make()
    found._row_ids = None
    assert propose(found) == [[]]

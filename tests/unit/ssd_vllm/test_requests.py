"""How steps of vLLM become rounds of the pool."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from ssd.pool.pool import DraftPool
from ssd.pool.round_log import RoundLog
from ssd.pool.rounds import NO_TABLE_NEEDED, Lookup, PoolRound, RoundResult
from ssd.pool.settings import DraftsSettings
from ssd.ports import SystemClock
from ssd.speculation.controller import Choice, Controller, Reason
from ssd.speculation.estimates import Calibration
from ssd.testing.clock import FakeClock
from ssd.testing.scripted_controller import ScriptedController
from ssd.types import LookupResult, Mode, OpenSession, Outcome, SequenceId
from ssd_vllm.requests import PoolRequests, Request, Step, seed_of
from ssd_vllm.step_control import StepControl

LOOKAHEAD = 3
NUM_TOKEN_IDS = 100
PROPOSAL = (7, 8)
SPECULATES = Choice(is_on=True, max_proposed=LOOKAHEAD)


class RecordingPool(DraftPool):
    """Keeps what it is given, and proposes the same tokens for all."""

    def __init__(self) -> None:
        super().__init__(DraftsSettings(branches=1), LOOKAHEAD, NUM_TOKEN_IDS, SystemClock())
        self.begun: dict[SequenceId, OpenSession] = {}
        self.opened: list[SequenceId] = []
        self.ended: list[SequenceId] = []
        self.released: list[SequenceId] = []
        self.rounds: list[list[RoundResult]] = []
        self.num_skips = 0

    @property
    def num_sessions(self) -> int:
        return len(self.opened)

    def begin(self, sequence_id: SequenceId, opening: OpenSession) -> None:
        self.begun[sequence_id] = opening

    def open_sessions(self, sequence_ids: Iterable[SequenceId]) -> None:
        self.opened = list(sequence_ids)

    def round(
        self,
        results: Rows[RoundResult],
        decided_at: float,
        before_wait: Callable[[], None],
        *,
        prompt_seconds: float = 0.0,
    ) -> PoolRound:
        before_wait()
        self.rounds.append(list(results))
        proposal = Lookup(LookupResult.HIT, tokens=PROPOSAL)
        lookups = [proposal if each.sequence_id else NO_TABLE_NEEDED for each in results]
        return PoolRound(lookups, decided_at)

    def release(self, sequence_ids: Iterable[SequenceId]) -> None:
        self.released += list(sequence_ids)

    def skip_interval(self) -> None:
        self.num_skips += 1

    def end(self, sequence_id: SequenceId) -> None:
        self.ended.append(sequence_id)


def request(
    name: str,
    prompt: tuple[int, ...] = (1, 2),
    max_len: int = 20,
    top_k: int = 0,
) -> Request:
    return Request(
        request_id=name,
        opening=OpenSession(
            token_ids=prompt,
            max_len=max_len,
            seed=3,
            temperature=0.5,
            top_k=top_k,
        ),
        ending_ids={99},
    )


def control_of(
    controller: Controller, mode: Mode = Mode.AUTO, log: RoundLog | None = None
) -> StepControl:
    return StepControl(controller, mode, LOOKAHEAD, log or RoundLog(), SystemClock())


def made(control: StepControl | None = None) -> tuple[RecordingPool, PoolRequests]:
    pool = RecordingPool()
    control = control or control_of(ScriptedController(SPECULATES))
    return pool, PoolRequests(pool, control, NUM_TOKEN_IDS)


def test_a_proposal_ends_before_the_minimum_length_of_its_text() -> None:
    pool, requests = made()
    requests.begin(replace(request("a"), min_len=2 + 5))
    text, most = [1, 2], []
    for _ in range(5):
        text.append(5)
        requests.propose(("a",), [[5]], [len(text)], [text])
        most.append(pool.rounds[-1][0].max_proposed)
    # The first row that may end the text is that of its sixth token.
    assert most == [3, 2, 1, 0, LOOKAHEAD]


def test_a_step_becomes_a_round_of_the_rows_that_got_tokens() -> None:
    pool, requests = made()
    for name in ("a", "b", "c"):
        requests.begin(request(name))
    assert requests.propose(("b",), [[9]], [3], [[1, 2, 9]]) == [[7, 8]]
    pool.rounds.clear()
    requests.begin_step(Step({"a", "b"}, {"b": 2}))
    assert pool.opened == [1], "b has a proposal, c does not run"
    found = requests.propose(
        ("a", "b", "c"), [[5], [7, 6], []], [3, 5, 2], [[1, 2, 5], [1, 2, 9, 7, 6], [1, 2]]
    )
    assert found == [[7, 8], [7, 8], []]
    assert pool.rounds == [
        [
            RoundResult(1, (5,), 0, Outcome(0, 5), is_finished=False, max_proposed=LOOKAHEAD),
            RoundResult(2, (7, 6), 2, Outcome(1, 6), is_finished=False, max_proposed=LOOKAHEAD),
        ]
    ]


def test_drafts_get_the_filter_of_a_request_within_their_bounds() -> None:
    pool, requests = made()
    requests.begin(request("a", top_k=20))
    requests.begin(request("b", top_k=2**40))
    assert [each.top_k for each in pool.begun.values()] == [20, NUM_TOKEN_IDS]


def test_a_text_that_the_pool_keeps_has_no_copy() -> None:
    pool, requests = made()
    requests.begin(request("a"))
    assert requests._requests["a"].opening is pool.begun[1]


def test_a_text_ends_with_an_ending_token_or_at_its_maximum_length() -> None:
    pool, requests = made()
    requests.begin(request("a"))
    requests.begin(request("b", max_len=3))
    requests.propose(("a", "b"), [[99], [5]], [3, 3], [[1, 2, 99], [1, 2, 5]])
    assert [each.is_finished for each in pool.rounds[0]] == [True, True]
    # A request that waits for more input has no other end.
    assert pool.released == [1, 2]


def test_a_text_that_vllm_has_changed_begins_again() -> None:
    pool, requests = made()
    requests.begin(request("a"))
    assert requests.propose(("a",), [[6]], [5], [[1, 2, 3, 4, 6, 0]]) == [[]]
    assert pool.ended == [1]
    assert pool.begun[2].token_ids == (1, 2, 3, 4, 6)
    assert requests.propose(("a",), [[7]], [6], [[1, 2, 3, 4, 6, 7]]) == [[7, 8]]


def test_tokens_after_another_proposal_begin_the_text_again() -> None:
    pool, requests = made()
    requests.begin(request("a"))
    requests.propose(("a",), [[5]], [3], [[1, 2, 5]])
    requests.propose(("a",), [[8, 6]], [5], [[1, 2, 5, 8, 6]])
    assert pool.ended == [1], "7 was proposed, not 8"
    assert pool.begun[2].token_ids == (1, 2, 5, 8, 6)


def test_a_trimmed_proposal_continues_its_text() -> None:
    pool, requests = made()
    requests.begin(request("a"))
    requests.propose(("a",), [[5]], [3], [[1, 2, 5]])
    requests.begin_step(Step({"a"}, {"a": 1}))
    requests.propose(("a",), [[7, 8]], [5], [[1, 2, 5, 7, 8]])
    assert pool.ended == [], "the bonus token is the proposed token that was not verified"
    assert pool.rounds[-1] == [
        RoundResult(1, (7, 8), 1, Outcome(1, 8), is_finished=False, max_proposed=LOOKAHEAD)
    ]


def test_the_mode_is_used_from_the_next_step_on() -> None:
    controller = ScriptedController(SPECULATES)
    control = control_of(controller, Mode.SPECULATIVE)
    pool, requests = made(control)
    requests.begin(request("a"))
    requests.begin_step(Step({"a"}))
    assert (pool.opened, pool.released) == ([1], [])
    control.set_mode(Mode.AUTOREGRESSIVE)
    pool.opened = []
    requests.begin_step(Step({"a"}))
    assert (pool.opened, pool.released) == ([], [1])
    requests.propose(("a",), [[5]], [3], [[1, 2, 5]])
    assert pool.rounds[-1][0].max_proposed == 0
    assert controller.rounds == []


def test_steps_are_in_the_status_and_in_the_metrics() -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(name, labels) or 0.0

    log, controller = RoundLog(), ScriptedController(SPECULATES, speed_up=1.5)
    _, requests = made(control_of(controller, log=log))
    requests.begin(request("a"))
    names: tuple[tuple[str, dict[str, str]], ...] = (
        ("ssd_rounds_total", {"result": "hit"}),
        ("ssd_proposed_tokens_total", {}),
        ("ssd_accepted_tokens_total", {"position": "1"}),
        ("ssd_accepted_tokens_total", {"position": "2"}),
        ("ssd_round_seconds_count", {"part": "verify"}),
    )
    before = [value(name, **labels) for name, labels in names]
    requests.begin_step(Step({"a", "lora"}, prompt_tokens=9))
    assert (log.counts.running, log.counts.eligible) == (2, 1)
    assert value("ssd_running_sequences") == 2
    requests.propose(("a",), [[5]], [3], [[1, 2, 5]])
    requests.begin_step(Step({"a"}, {"a": 2}))
    requests.propose(("a",), [[7, 4]], [5], [[1, 2, 5, 7, 4]])
    grown = [value(name, **labels) - old for (name, labels), old in zip(names, before, strict=True)]
    assert grown == [2, 2, 1, 0, 1], "the first step has no time"
    assert log.tokens_per_round == 2.0
    assert 0 < log.efficiency < 1
    assert (log.speculation.speed_up, value("ssd_speculation_speed_up")) == (1.5, 1.5)
    requests.begin_step(Step())
    assert value("ssd_running_sequences") == 0


def test_token_ids_that_no_draft_has_end_the_sessions_of_their_request_only() -> None:
    pool, requests = made()
    requests.begin(request("a", prompt=(1, NUM_TOKEN_IDS)))
    assert not pool.begun
    requests.begin(request("b"))
    requests.propose(("b",), [[NUM_TOKEN_IDS]], [3], [[1, 2, NUM_TOKEN_IDS]])
    assert pool.ended == [1]


def test_preempted_requests_release_their_sessions() -> None:
    pool, requests = made()
    requests.begin(request("a"))
    requests.begin_step(Step(preempted={"a"}))
    assert pool.released == [1]


def test_a_reset_ends_all_requests() -> None:
    pool, requests = made()
    for name in ("a", "b"):
        requests.begin(request(name))
    requests.reset()
    assert sorted(pool.ended) == [1, 2]
    requests.begin_step(Step({"a", "b"}))
    assert pool.opened == []


def test_requests_that_are_not_known_only_count_in_the_round() -> None:
    pool, requests = made()
    requests.begin_step(Step({"lora"}))
    requests.propose(("lora",), [[5]], [3], [[1, 2, 5]])
    assert [(each.sequence_id, each.max_proposed) for each in pool.rounds[0]] == [(0, 0)]
    requests.begin(request("a"))
    requests.end("a")
    requests.end("a")
    assert pool.ended == [1]


@pytest.mark.parametrize(("is_on", "eligible"), [(True, 2), (False, 0)])
def test_requests_are_eligible_while_the_controller_speculates(
    *, is_on: bool, eligible: int
) -> None:
    log = RoundLog()
    log.speculation = log.speculation._replace(is_on=is_on)
    control_of(ScriptedController(SPECULATES, speed_up=1.5), log=log).begin(3, 2)
    assert log.counts.eligible == eligible


def test_the_controller_closes_sessions_and_opens_them_again() -> None:
    controller = ScriptedController(SPECULATES, speed_up=1.5)
    pool, requests = made(control_of(controller))
    requests.begin(request("a"))
    requests.begin_step(Step({"a"}))
    assert (pool.opened, pool.released) == ([1], [])
    controller.choices = [Choice(is_on=False, max_proposed=0)]
    pool.opened = []
    for _ in range(2):
        requests.begin_step(Step({"a"}))
    assert (pool.opened, pool.released) == ([], [1])
    controller.choices = [SPECULATES]
    requests.begin_step(Step({"a"}))
    assert pool.opened == [1]


def test_steps_are_measured_but_for_the_first() -> None:
    controller = ScriptedController(SPECULATES, speed_up=1.5)
    _, requests = made(control_of(controller))
    requests.begin(request("a"))
    text = [1, 2, 5]
    for count, prompt_tokens in ((0, 9), (2, 9), (2, 0)):
        proposed = {"a": count} if count else {}
        requests.begin_step(Step({"a"}, proposed, prompt_tokens=prompt_tokens))
        added = [7, 4] if count else [5]
        text += added if count else []
        requests.propose(("a",), [added], [len(text)], [text])
    with_prompt, sample = controller.rounds
    assert (with_prompt.prompt_tokens, sample.prompt_tokens) == (9, 0)
    assert (sample.num_sequences, sample.num_tokens, sample.num_proposed) == (1, 2, 2)
    assert (sample.columns, sample.num_accepted, sample.num_answered) == (3, [1], 1)
    assert 0 <= sample.verify_seconds <= sample.seconds


def test_the_status_is_of_the_mode_that_is_set_before_its_first_step() -> None:
    log = RoundLog()
    control = control_of(ScriptedController(SPECULATES), Mode.AUTOREGRESSIVE, log)
    control.begin(2, 1)
    assert (log.auto_speculation.is_on, log.counts.eligible) == (False, 0)
    control.set_mode(Mode.AUTO)
    assert log.auto_speculation.is_on
    control.begin(2, 1)
    assert log.counts.eligible == 1


@pytest.mark.parametrize("prompt_tokens", [0, 100])
def test_slow_speculation_ends_also_where_all_steps_store_prompts(prompt_tokens: int) -> None:
    clock, log = FakeClock(), RoundLog()
    times = {(columns, 1): 0.01 for columns in range(1, LOOKAHEAD + 2)}
    controller = Controller(tuple(range(1, LOOKAHEAD + 2)), LOOKAHEAD, Calibration(times))
    control = StepControl(controller, Mode.AUTO, LOOKAHEAD, log, clock)
    for _ in range(200):
        control.begin(1, 1)
        count = control.choice.max_proposed
        clock.advance(prompt_tokens * 1e-4 + (0.03 if count else 0.01))
        result = RoundResult(1, (5,), count, Outcome(0, 5), is_finished=False, max_proposed=count)
        control.end(
            [result],
            PoolRound([Lookup(LookupResult.MISS)], clock.now()),
            decided_at=clock.now(),
            num_sessions=int(control.choice.is_on),
            prompt_tokens=prompt_tokens,
        )
    assert log.speculation.reason is Reason.SLOWER
    assert 0.3 < log.speculation.speed_up < 0.35


def test_the_time_in_which_no_request_decodes_belongs_to_no_step() -> None:
    controller = ScriptedController(SPECULATES)
    pool, requests = made(control_of(controller))

    def step(name: str, added: list[int], prompt_tokens: int = 0) -> int:
        before = pool.num_skips
        requests.begin_step(Step({name}, prompt_tokens=prompt_tokens))
        requests.propose((name,), [added], [3], [[1, 2, 5]])
        return pool.num_skips - before

    requests.begin(request("a"))
    assert step("a", []) == 1, "no row has a token"
    assert step("a", [5], prompt_tokens=9) == 1, "the prompt is stored in the same pass"
    before = pool.num_skips
    requests.end("a")
    assert pool.num_skips == before + 1
    requests.begin(request("b"))
    assert step("b", [5]) == 0
    assert not controller.rounds, "each step is the first one after a rest"


@pytest.mark.parametrize(("seconds", "is_measured"), [(0.5, True), (20.0, False)])
def test_the_time_in_which_the_engine_is_paused_belongs_to_no_step(
    seconds: float, *, is_measured: bool
) -> None:
    clock, controller = FakeClock(), ScriptedController(SPECULATES)
    control = StepControl(controller, Mode.AUTO, LOOKAHEAD, RoundLog(), clock)
    pool, requests = made(control)
    requests.begin(request("a"))
    before = pool.num_skips
    for _ in range(2):
        requests.begin_step(Step({"a"}))
        requests.propose(("a",), [[5]], [3], [[1, 2, 5]])
        clock.advance(seconds)
    assert len(controller.rounds) == is_measured
    assert pool.num_skips - before == 1 - is_measured


def test_a_request_without_a_seed_has_one_of_its_id() -> None:
    assert seed_of("a", None) == seed_of("a", None) != seed_of("b", None)
    assert seed_of("a", -1) == 2**64 - 1
    assert seed_of("a", 0) == 0

"""Rounds yield the tokens of plain decoding for every behaviour of the drafts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.ssd_target.bench import GREEDY, WARM, Backup, Bench, plain

from ssd.engine.batch import PagedBatch
from ssd.errors import NotFiniteError, OverloadedError, RankError
from ssd.pool.table_deadline import RoundPace
from ssd.speculation.controller import Choice
from ssd.speculation.estimates import Calibration
from ssd.testing.scripted_controller import ScriptedController
from ssd.testing.scripted_draft import Behaviour
from ssd.types import FinishReason, Mode, OpenSession, SamplingParams, TokenId
from ssd_target.decoding import decode_loop
from ssd_target.decoding.sampler import RingSampler


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("length", [1, 2, 8, 9, 17, 30])
def test_plain_decoding_yields_the_tokens_of_the_runner(
    sampling: SamplingParams, length: int
) -> None:
    bench = Bench()
    prompt = [(3 * i + 1) % 13 for i in range(length)]
    sink = bench.submit(prompt, 20, sampling=sampling, mode=Mode.AUTOREGRESSIVE)
    bench.run()
    assert sink.tokens == plain(prompt, 20, sampling)
    assert sink.finish_reason is FinishReason.LENGTH
    assert sink.statistics.mode is Mode.AUTOREGRESSIVE
    assert sink.statistics.rounds == 20


def test_a_step_with_long_prompts_has_a_heartbeat_before_each_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(step_tokens=64)
    prefill, verify = bench.runner.prefill, bench.runner.verify
    busy_seconds: list[float] = []

    def slow_prefill(batch: PagedBatch, before_pass: Callable[[], None]) -> Any:
        before_pass()
        busy_seconds.append(bench.watchdog.busy_seconds)
        bench.clock.time += 40.0
        return prefill(batch, before_pass=lambda: None)

    def timed_verify(prepared: Any) -> Any:
        busy_seconds.append(bench.watchdog.busy_seconds)
        return verify(prepared)

    monkeypatch.setattr(bench.runner, "prefill", slow_prefill)
    monkeypatch.setattr(bench.runner, "verify", timed_verify)
    for first in (1, 2, 3):
        bench.submit([first] * 17, 4)
    bench.run()
    assert bench.clock.time >= 120.0
    assert max(busy_seconds) < 1.0


def events_of(monkeypatch: pytest.MonkeyPatch, *calls: tuple[object, str, str]) -> list[str]:
    """A list that receives an event at each call: of an owner, its name, and the event."""
    events: list[str] = []

    def record(owner: object, name: str, event: str) -> None:
        call = getattr(owner, name)

        def recorded(*args: Any, **named: Any) -> Any:
            events.append(event)
            return call(*args, **named)

        monkeypatch.setattr(owner, name, recorded)

    for each in calls:
        record(*each)
    return events


def passes_and_wakeups(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that release the interpreter, and those that wake the readers."""
    return events_of(
        monkeypatch,
        (bench.wakeups, "flush", "wake"),
        (bench.runner, "verify", "verify"),
        (bench.runner, "prefill", "prefill"),
        (bench.pool._changed, "wait", "wait"),
    )


def test_readers_are_woken_before_each_pass_and_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    events = passes_and_wakeups(bench, monkeypatch)
    bench.submit([1, 2, 3], 3, mode=Mode.AUTOREGRESSIVE)
    bench.submit(range(10), 3, mode=Mode.AUTOREGRESSIVE)
    bench.run()
    bench.run_rounds()
    assert {"verify", "prefill"} < set(events)
    before = [events[index - 1] for index, each in enumerate(events) if each != "wake"]
    assert set(before) == {"wake"}
    assert events[-1] == "wake"


def test_readers_are_woken_before_a_round_waits_for_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(deadline_ms=20.0)
    events = passes_and_wakeups(bench, monkeypatch)
    bench.join([Behaviour.HIT, Behaviour.HIT, Behaviour.SILENT])
    bench.submit([1, 2, 3, 4, 5], 12)
    bench.run()
    assert "wait" in events
    assert all(
        events[index - 1] in ("wake", "wait") for index, each in enumerate(events) if each == "wait"
    )


@pytest.mark.parametrize("joins_prompts", [False, True])
def test_the_time_in_which_prompts_are_stored_pays_for_no_wait(
    monkeypatch: pytest.MonkeyPatch, *, joins_prompts: bool
) -> None:
    controller = ScriptedController(Choice(is_on=True, max_proposed=3))
    controller.calibration = Calibration({(1, 1): 0.001})
    bench = Bench(joins_prompts=joins_prompts, controller=controller)
    store, found = bench.runner._store_prompts, list[float]()

    def take_long(batch: PagedBatch) -> Any:
        bench.clock.time += 1000.0
        return store(batch)

    monkeypatch.setattr(bench.runner, "_store_prompts", take_long)
    monkeypatch.setattr(
        RoundPace, "add_round", lambda _pace, seconds, *, is_plain: found.append(seconds)
    )
    bench.join([Behaviour.HIT])
    bench.submit([1, 2, 3], 16)
    bench.run_rounds()
    bench.submit(range(32), 16)
    bench.run()
    assert bench.clock.time > 2000.0
    assert any(bench.runner.joined) == joins_prompts
    assert 0.0 < min(found) <= max(found) < 1.0


def test_the_prompts_of_requests_that_arrive_later_are_stored_by_verifies() -> None:
    prompts = [[1, 2, 3], [4] * 20, [5, 6] * 12, [7] * 9]
    bench = Bench(joins_prompts=True, step_tokens=64)
    sinks = [bench.submit(prompts[0], 12)]
    bench.run_rounds()
    sinks += [bench.submit(each, 12) for each in prompts[1:]]
    bench.run_rounds()
    bench.run()
    assert [each.tokens for each in sinks] == [plain(each, 12, GREEDY) for each in prompts]
    assert bench.runner.joined[:3] == [1, 3, 0]


def test_the_time_without_a_request_belongs_to_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[float]()
    monkeypatch.setattr(
        RoundPace, "add_round", lambda _pace, seconds, *, is_plain: found.append(seconds)
    )
    bench = Bench()
    bench.join([Behaviour.HIT])
    for _ in range(2):
        bench.submit([1, 2, 3], 40)
        bench.run_rounds(3)
        bench.inbox.cancel(bench.num_submitted)
        bench.run_rounds()
        bench.clock.time += 1000.0
    assert len(found) >= 2
    assert max(found) < 1.0


@pytest.mark.parametrize("backup", ["none", "ngram"])
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("behaviour", list(Behaviour))
def test_no_behaviour_of_a_draft_changes_a_token(
    behaviour: Behaviour, sampling: SamplingParams, backup: Backup
) -> None:
    bench = Bench(backup=backup)
    bench.join([Behaviour.HIT, Behaviour.HIT, behaviour], sampling=sampling)
    sink = bench.submit([1, 2, 3, 4, 5], 30, sampling=sampling)
    bench.run()
    assert sink.tokens == plain([1, 2, 3, 4, 5], 30, sampling)


@pytest.mark.parametrize(
    "script",
    [
        [Behaviour.BAD_ID],
        [Behaviour.HIT, Behaviour.AHEAD],
        [Behaviour.HIT, Behaviour.GARBAGE],
        [Behaviour.COLUMNS, Behaviour.CONTRARY],
    ],
)
def test_an_invalid_table_closes_the_link(script: list[Behaviour]) -> None:
    bench = Bench()
    bench.join(script)
    sink = bench.submit([1, 2, 3], 20)
    bench.run()
    assert bench.pool.links() == ()
    assert sink.tokens == plain([1, 2, 3], 20, GREEDY)


def test_a_draft_that_always_hits_supplies_a_full_proposal_per_round() -> None:
    bench = Bench()
    bench.join([Behaviour.HIT])
    sink = bench.submit([1, 2, 3], 1 + 4 * 5)
    bench.run()
    statistics = sink.statistics
    assert statistics.rounds == 1 + 5
    assert (statistics.hits, statistics.misses, statistics.late) == (5, 0, 0)
    assert statistics.accepted_tokens == statistics.proposed_tokens == 15
    assert statistics.mode is Mode.SPECULATIVE


@pytest.mark.parametrize("backup", ["none", "ngram"])
@pytest.mark.parametrize("script", [[Behaviour.HIT], [Behaviour.HIT, Behaviour.MISS]])
def test_proposals_are_shorter_near_the_limit(script: list[Behaviour], backup: Backup) -> None:
    prompt = [1, 2, 3]
    sizes: set[int] = set()
    for limit in range(1, 12):
        bench = Bench(backup=backup)
        bench.join(script)
        sink = bench.submit(prompt, limit)
        batches = recorded(bench)
        bench.run()
        assert sink.tokens == plain(prompt, limit, GREEDY)
        assert len(batches) == sink.statistics.rounds
        for batch in batches:
            num_proposed = int(batch.num_columns_B[0]) - 1
            num_emitted = int(batch.first_positions_B[0]) + 1 - len(prompt)
            assert num_proposed <= limit - num_emitted - 1
            sizes.add(num_proposed)
    assert sizes == {0, 1, 2, 3}


def test_the_commit_is_sent_before_the_noise_of_the_next_round_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.join([Behaviour.HIT], sampling=WARM)
    events = events_of(
        monkeypatch,
        (bench.pool, "round", "round"),
        (bench.runner, "verify", "verify"),
        (RingSampler, "fill", "noise"),
    )
    bench.submit([1, 2, 3], 40, sampling=WARM)
    bench.run_rounds(3)
    # After the verify, only the first round lacks the noise of its token.
    assert events == ["verify", "noise", "round", "noise"] * 3


def test_readers_are_woken_before_noise_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_loop, "_LONG_NOISE_SECONDS", -1.0)
    bench = Bench()
    bench.join([Behaviour.HIT], sampling=WARM)
    events = events_of(
        monkeypatch,
        (bench.pool, "round", "round"),
        (bench.wakeups, "flush", "wake"),
        (RingSampler, "fill", "noise"),
    )
    bench.submit([1, 2, 3], 40, sampling=WARM)
    bench.run_rounds()
    assert events[events.index("round") :][:3] == ["round", "wake", "noise"]


def recorded(bench: Bench) -> list[PagedBatch]:
    """Return a list that receives the batches that the bench verifies from now on."""
    batches: list[PagedBatch] = []
    forward = bench.runner.forward

    def record(batch: PagedBatch) -> torch.Tensor:
        batches.append(batch)
        logits_BPV: torch.Tensor = forward(batch)
        return logits_BPV

    bench.runner.forward = record
    return batches


def test_a_miss_or_a_late_table_still_yields_one_token() -> None:
    bench = Bench(circuit_breaker=False)
    bench.join([Behaviour.MISS, Behaviour.MISS, Behaviour.SILENT])
    sink = bench.submit([1, 2, 3], 10)
    bench.run()
    assert sink.statistics.misses == 2
    assert sink.statistics.late == 6
    assert sink.statistics.rounds == 10


def test_rounds_do_not_wait_for_the_first_table_of_a_session() -> None:
    bench = Bench()
    bench.join([Behaviour.SILENT])
    sink = bench.submit([1, 2, 3], 10)
    bench.run()
    assert sink.statistics.late == 0


def test_three_rounds_without_a_table_open_the_circuit_breaker_for_a_while() -> None:
    bench = Bench()
    draft = bench.join([Behaviour.HIT, *[Behaviour.SILENT] * 3, Behaviour.HIT])
    sink = bench.submit([1, 2, 3], 16)
    bench.run_rounds(8)
    assert draft.num_sessions == 0
    bench.clock.time += 6.0
    bench.run()
    assert len(draft.openings) == 2
    assert sink.statistics.hits >= 2


def test_sequences_of_a_lost_draft_open_sessions_on_another_link() -> None:
    bench = Bench()
    first = bench.join([Behaviour.HIT, Behaviour.DIE], name="first")
    sampling = replace(GREEDY, top_k=5, min_p=0.25)
    sink = bench.submit([1, 2, 3], 40, sampling=sampling)
    bench.run_rounds()
    second = bench.join([Behaviour.HIT], name="second")
    bench.run()
    assert sink.tokens == plain([1, 2, 3], 40, GREEDY)
    opening = next(each for each in second.received if isinstance(each, OpenSession))
    assert len(opening.token_ids) > 3, "it opens with all committed tokens"
    assert (opening.top_k, opening.min_p) == (5, 0.25)
    assert sink.statistics.hits > 5
    assert first.num_sessions == 1


def test_an_abandoned_sink_cancels_its_sequence() -> None:
    bench = Bench()
    sink = bench.submit([1, 2, 3], 40)
    sink.is_abandoned = True
    bench.run_rounds(2)
    assert sink.finish_reason is FinishReason.CANCELLED


def test_an_end_of_text_token_inside_a_proposal_ends_the_text() -> None:
    text = plain([1, 2, 3], 30, GREEDY)
    end = text[9]
    expected = text[: text.index(end) + 1]
    for script in ([Behaviour.HIT], [Behaviour.MISS]):
        bench = Bench()
        draft = bench.join(script)
        sink = bench.submit([1, 2, 3], 30, eos=[end])
        bench.run()
        assert sink.tokens == expected
        assert sink.finish_reason is FinishReason.STOP
        assert draft.num_sessions == 0


def test_requests_beyond_the_queue_fail_and_the_others_finish() -> None:
    bench = Bench()
    sinks = [bench.submit([1, 2, number % 13], 4) for number in range(16)]
    bench.run()
    failed = [sink for sink in sinks if isinstance(sink.error, OverloadedError)]
    assert len(failed) == 2
    assert all(len(sink.tokens) == 4 for sink in sinks if sink.error is None)


@pytest.mark.parametrize("script", [[Behaviour.SILENT], [Behaviour.HIT]])
@pytest.mark.parametrize("joins_prompts", [False, True])
def test_a_row_that_is_not_finite_fails_its_sequence_as_in_plain_decoding(
    script: list[Behaviour], *, joins_prompts: bool
) -> None:
    prompts = [[1, 2, 3], [4, 4], [9, 8, 7], list(range(10)) * 2]
    texts = [plain(prompt, 20, WARM) for prompt in prompts]
    for bad in (1, 4, 7, 12):
        bench = Bench(joins_prompts=joins_prompts)
        draft = bench.join(script, sampling=WARM)
        bench.runner.nan_token = bad
        sinks = [bench.submit(prompt, 20, sampling=WARM) for prompt in prompts]
        bench.run()
        assert draft.num_sessions == 0
        for sink, prompt, text in zip(sinks, prompts, texts, strict=True):
            whole = [*prompt, *text]
            # The last token of a text is never run.
            position = whole.index(bad) if bad in whole[:-1] else None
            if position is None:
                assert sink.tokens == text
                continue
            assert sink.tokens == whole[len(prompt) : position + 1]
            assert isinstance(sink.error, NotFiniteError)
            assert f"at position {position} of the sequence (token id {bad})" in str(sink.error)


def test_a_rejected_proposal_that_is_not_finite_changes_nothing() -> None:
    text = plain([1, 2, 3], 30, GREEDY)
    for bad in set(range(13)) - {1, 2, 3, *text}:
        bench = Bench()
        bench.join([Behaviour.WRONG])
        bench.runner.nan_token = bad
        sink = bench.submit([1, 2, 3], 30)
        batches = recorded(bench)
        bench.run()
        assert sink.tokens == text
        if any(bad in batch.tokens_BP[0, 1 : batch.num_columns_B[0]] for batch in batches):
            return
    pytest.fail("no bad token was proposed")


@pytest.mark.parametrize(
    ("crash", "received"), [(ZeroDivisionError("x"), RuntimeError), (RankError("lost"), RankError)]
)
def test_a_crash_fails_all_requests(crash: Exception, received: type[Exception]) -> None:
    bench = Bench()
    running, waiting = bench.submit([1, 2, 3], 40), bench.submit([1], 40)

    def explode(batch: object) -> None:
        raise crash

    bench.runner.forward = explode
    with pytest.raises(type(crash)):
        bench.loop.run()
    assert type(running.error) is received
    assert type(waiting.error) is received
    # A reader's traceback would keep the request of another one.
    assert running.error is not waiting.error


def test_usage_contains_the_tokens_of_the_prefix_cache() -> None:
    bench = Bench()
    prompt = [number % 13 for number in range(20)]
    for cached in (0, 16):
        sink = bench.submit(prompt, 5)
        bench.run()
        assert sink.usage.cached_tokens == cached
        assert sink.tokens == plain(prompt, 5, GREEDY)


def test_a_prompt_that_is_not_finite_fails_again_after_it_has_failed() -> None:
    bench = Bench()
    bench.runner.nan_token = 12
    for _ in range(2):
        sink = bench.submit([number % 13 for number in range(20)], 5)
        bench.run()
        assert isinstance(sink.error, NotFiniteError)


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 12), min_size=1, max_size=24),
        st.integers(1, 30),
        st.integers(0, 12),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=40, deadline=None)
@given(
    requests=REQUESTS,
    script=st.lists(st.sampled_from(list(Behaviour)), min_size=1, max_size=30),
    options=st.fixed_dictionaries(
        {
            "backup": st.sampled_from(["none", "ngram"]),
            "num_blocks": st.sampled_from([17, 20, 80]),
            "step_tokens": st.sampled_from([8, 64]),
            "joins_prompts": st.booleans(),
        }
    ),
    warm=st.booleans(),
)
def test_every_batch_with_every_draft_yields_the_tokens_of_plain_decoding(
    requests: list[tuple[list[TokenId], int, int]],
    script: list[Behaviour],
    options: dict[str, Any],
    *,
    warm: bool,
) -> None:
    sampling = WARM if warm else GREEDY
    bench = Bench(**options)
    bench.join(script, sampling=sampling)
    sinks = []
    for number, (prompt, limit, delay) in enumerate(requests):
        priority = number % 3
        sinks.append(bench.submit(prompt, limit, sampling=sampling, priority=priority))
        bench.run_rounds(delay)
    bench.run()
    for sink, (prompt, limit, _) in zip(sinks, requests, strict=True):
        assert sink.tokens == plain(prompt, limit, sampling)

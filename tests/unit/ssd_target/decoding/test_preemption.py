"""A preempted sequence continues as if nothing had happened."""

from dataclasses import replace

from tests.sequences import check_scheduler
from tests.unit.ssd_target.bench import WARM, Bench, num_preemptions, plain

from ssd.testing.scripted_draft import Behaviour
from ssd.types import FinishReason, LookupResult


def test_a_preempted_sequence_continues_with_the_same_tokens_and_a_new_session() -> None:
    bench = Bench(num_blocks=18)
    draft = bench.join([Behaviour.HIT, Behaviour.MISS], sampling=WARM)
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
    sinks = [bench.submit(prompt, 50, sampling=WARM) for prompt in prompts]
    bench.run_rounds()
    assert draft.num_sessions == 2
    while not bench.log.counts.waiting:
        bench.run_rounds()
    assert draft.num_sessions == 1, "the session of a preempted sequence is closed"
    bench.run()
    assert len(draft.openings) > 2
    for sink, prompt in zip(sinks, prompts, strict=True):
        assert sink.tokens == plain(prompt, 50, WARM)
        assert sink.finish_reason is FinishReason.LENGTH


def test_a_round_after_a_preemption_reports_no_lookup() -> None:
    bench = Bench(num_blocks=18)
    bench.join([Behaviour.HIT], sampling=WARM)
    sinks = [bench.submit(text, 50, sampling=WARM, report_rounds=True) for text in ([1], [5])]
    bench.run()
    # The last round of a text may have no room for a proposal.
    rounds = [each for sink in sinks for chunk in sink.chunks[:-1] for each in chunk.rounds]
    assert any(each.lookup is LookupResult.HIT for each in rounds)
    assert all(each.proposed for each in rounds if each.lookup is LookupResult.HIT)


def test_a_preemption_changes_nothing_of_a_request_with_penalties_and_logprobs() -> None:
    sampling = replace(
        WARM, repetition_penalty=1.4, frequency_penalty=0.3, top_k=6, min_tokens=40, logprobs=2
    )
    before = num_preemptions()
    found = []
    for num_blocks in (80, 18):
        bench = Bench(num_blocks=num_blocks)
        prompts = [[1, 2, 3, 4], [5, 6, 7, 8, 9]]
        sinks = [bench.submit(prompt, 50, sampling=sampling, eos=[3]) for prompt in prompts]
        bench.run()
        found.append(
            [
                (sink.tokens, [each for chunk in sink.chunks for each in chunk.logprobs])
                for sink in sinks
            ]
        )
    assert found[0] == found[1]
    assert len(found[0][1][1]) == len(found[0][1][0]) >= 40
    assert num_preemptions() > before


def test_a_sequence_that_is_cancelled_while_it_waits_again_ends_with_its_tokens() -> None:
    bench = Bench(num_blocks=18)
    other, sink = bench.submit([1, 2, 3, 4], 50), bench.submit([5, 6, 7, 8, 9], 50)
    while not bench.log.counts.waiting:
        bench.run_rounds()
        check_scheduler(bench.scheduler)
    bench.inbox.cancel(2)
    bench.run()
    assert sink.finish_reason is FinishReason.CANCELLED
    assert sink.usage.completion_tokens == len(sink.tokens) > 0
    assert len(other.tokens) == 50

"""A request that asks for its rounds receives each of them; its tokens stay the same."""

import pytest
from tests.unit.ssd_target.bench import Bench

from ssd.testing.scripted_draft import Behaviour
from ssd.types import LookupResult, Mode

PROMPT = [1, 2, 3]


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.AUTOREGRESSIVE])
def test_rounds_contain_all_tokens_and_count_as_the_statistics(mode: Mode) -> None:
    bench = Bench()
    bench.join([Behaviour.HIT, Behaviour.MISS, Behaviour.HIT, Behaviour.HIT])
    sink = bench.submit(PROMPT, 20, mode=mode, report_rounds=True)
    bench.run()
    rounds = [each for chunk in sink.chunks for each in chunk.rounds]
    added = [token.id for each in rounds for token in each.added]
    assert added == sink.tokens
    statistics = sink.statistics
    assert len(rounds) == statistics.rounds
    assert sum(len(each.proposed) for each in rounds) == statistics.proposed_tokens
    assert sum(each.accepted_tokens for each in rounds) == statistics.accepted_tokens
    # The lookup of the last round selects no proposal.
    found = [each.lookup for each in rounds]
    assert found.count(LookupResult.HIT) == statistics.hits
    assert found.count(LookupResult.MISS) == statistics.misses
    assert (LookupResult.HIT in found) == (mode is Mode.AUTO)
    for each in rounds:
        assert each.added[: each.accepted_tokens] == each.proposed[: each.accepted_tokens]


def test_requests_that_do_not_ask_receive_no_rounds() -> None:
    bench = Bench()
    bench.join([Behaviour.HIT])
    silent = bench.submit(PROMPT, 12)
    asking = bench.submit(PROMPT, 12, report_rounds=True)
    bench.run()
    assert silent.tokens == asking.tokens
    assert not any(chunk.rounds for chunk in silent.chunks)
    assert sum(len(chunk.rounds) for chunk in asking.chunks) == asking.statistics.rounds

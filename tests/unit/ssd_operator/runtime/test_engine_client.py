"""Reports of targets, as a pass reads them."""

from itertools import cycle, islice

import pytest

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.observe.facts import PoolFact
from ssd_operator.runtime.engine_client import FLOOR_SECONDS, pool_fact, with_floors


def answer(at: float, round_trip_seconds: float, draft: str = "d") -> PoolFact:
    link = LinkStatus(
        address="10.0.0.1:50052",
        draft_pod=draft,
        state="Active",
        round_trip_seconds=round_trip_seconds,
    )
    return PoolFact(target_pod="t", at=at, links=(link,))


def read(*round_trips: float) -> list[float]:
    """Round trips that a pass reads, of reports ten seconds apart."""
    facts = [answer(0.0, round_trips[0])]
    for number, seconds in enumerate(round_trips[1:], start=1):
        facts.append(with_floors(facts[-1], answer(10.0 * number, seconds)))
    return [fact.links[0].round_trip_seconds for fact in facts]


def test_a_round_trip_that_varies_on_an_idle_machine_stays_where_it_is() -> None:
    varying = list(islice(cycle([1.1e-3, 4.8e-3, 2.0e-3, 5.0e-3, 3.1e-3]), 200))
    assert max(read(*varying)) < 2 * 1.1e-3


def test_a_link_that_became_slower_or_faster_is_reported_so() -> None:
    assert read(1e-3, *[5e-3] * 100)[-1] == 5e-3
    assert read(1e-3, *[5e-3] * 15)[-1] == pytest.approx(1e-3 * 2 ** (150 / FLOOR_SECONDS))
    assert read(5e-3, 1e-3)[-1] == 1e-3


def test_another_draft_at_the_same_address_is_measured_again() -> None:
    assert with_floors(answer(0.0, 1e-3), answer(10.0, 5e-3, "e")) == answer(10.0, 5e-3, "e")


def test_a_link_that_was_not_measured_sets_no_floor() -> None:
    assert read(0.0, 5e-3) == [0.0, 5e-3]


def test_the_report_of_a_target_becomes_a_fact() -> None:
    link = LinkStatus(address="a:1", state="active", draft_pod="d", draft_weights="sha256:d")
    status = PoolStatus(
        links=(link,),
        tokens_per_round=3.0,
        efficiency=0.9,
        weights_fingerprint="sha256:t",
        dtype="float32",
        dtype_reason="no packing",
    )
    fact = pool_fact("t", status, 7.0)
    assert (fact.target_pod, fact.at, fact.links[0].state) == ("t", 7.0, "Active")
    assert (fact.tokens_per_round, fact.efficiency) == (3.0, 0.9)
    assert (fact.dtype, fact.dtype_reason) == ("float32", "no packing")
    assert (fact.weights_fingerprint, fact.links[0].draft_weights) == ("sha256:t", "sha256:d")

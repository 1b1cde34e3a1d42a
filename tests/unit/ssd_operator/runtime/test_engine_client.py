"""Reports of targets, as a pass reads them."""

from ssd.rpc.pool_codec import LinkStatus, PoolStatus
from ssd_operator.runtime.engine_client import pool_fact


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

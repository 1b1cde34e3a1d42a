"""How links travel, as measured."""

import pytest
from tests.unit.ssd_operator.scenes import Scene, answer, link

from ssd_operator.status.transports import effective_transport, transport_of


@pytest.mark.parametrize(
    ("found", "effective"),
    [
        (("nvlink", "tcp", "rdma"), "TCP"),
        (("nvlink", "rdma"), "RDMA"),
        (("nvlink",), "NVLink"),
        (("nvlink", "something new"), "something new"),
    ],
)
def test_the_effective_transport_is_the_worst_of_the_active_links(
    found: tuple[str, ...], effective: str
) -> None:
    links = [link(f"d{number}", transport=name) for number, name in enumerate(found)]
    scene = Scene(pools=(answer("t0", *links),))
    assert effective_transport(scene.snapshot) == {"effective": effective}


def test_a_link_that_is_not_active_does_not_count() -> None:
    refused = link("d1", "Refused", reason="link_too_slow: 312 us", transport="tcp")
    assert effective_transport(Scene(pools=(answer("t0", refused),)).snapshot) == {}


def test_the_links_of_a_target_that_does_not_report_their_transport_use_tcp() -> None:
    assert transport_of(link("d0", transport="")) == "TCP"
    assert transport_of(link("d0", "Connecting", transport="")) == "", "not known yet"

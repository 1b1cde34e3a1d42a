"""How links travel as measured, and what is said of it where something faster was asked for."""

import pytest
from tests.unit.ssd_operator.scenes import Scene, answer, link

from ssd_operator.fast_path import fast_path, transport_block, transport_of
from ssd_operator.spec import Accelerator, Object, Rdma, Transport

CARD = Rdma(resource_name="rdma/hca")
NVLINK = Transport(tier="NVLinkPrivileged")
NVLINK_ONLY = Transport(tier="NVLinkPrivileged", require="NVLink")
RDMA = Transport(tier="RDMA", rdma=CARD)
REFUSAL = (
    "link_too_slow: its round trip is 312 us over tcp, at most 1 us are allowed: "
    "place the draft nearer, or raise the limit"
)
TOO_SLOW = link("d1", "Refused", reason=REFUSAL, transport="tcp", round_trip_seconds=312e-6)


def scene(transport: Transport, *found: str) -> Scene:
    """A target with an active link of each of these transports."""
    links = [link(f"d{number}", transport=name) for number, name in enumerate(found)]
    return asking(transport, answer("t0", *links))


def asking(transport: Transport, *answers: object) -> Scene:
    spec: Object = {"accelerator": Accelerator.NVIDIA, "transport": transport}
    return Scene(pools=answers, spec=spec)  # type: ignore[arg-type]


def judge(found: Scene) -> tuple[str, str]:
    condition = fast_path(found.census)
    assert condition is not None
    return str(condition.truth), condition.reason


@pytest.mark.parametrize(
    "transport",
    [Transport(), Transport(tier="TCP"), Transport(max_round_trip_microseconds=1)],
)
def test_who_asks_for_no_fabric_is_told_of_none(transport: Transport) -> None:
    assert fast_path(scene(transport, "tcp").census) is None


VERDICTS = [
    (scene(NVLINK, "nvlink", "nvlink"), "True", "Verified"),
    (scene(NVLINK, "nvlink", "rdma"), "False", "FellBack"),
    (scene(NVLINK, "tcp"), "False", "FellBack"),
    (scene(NVLINK_ONLY, "nvlink"), "True", "Verified"),
    (scene(RDMA, "rdma"), "True", "Verified"),
    (scene(RDMA, "nvlink", "rdma"), "True", "Verified"),
    (scene(RDMA, "tcp"), "False", "FellBack"),
    (scene(Transport(rdma=CARD), "tcp"), "False", "FellBack"),
    (scene(Transport(tier="NVLinkPrivileged", require="RDMA"), "rdma"), "False", "FellBack"),
    (scene(RDMA, "something new"), "False", "FellBack"),
    (scene(RDMA), "Unknown", "Unverified"),
    (asking(RDMA), "Unknown", "Unverified"),
    (asking(RDMA, answer("t0", link("d0", "Connecting"))), "Unknown", "Unverified"),
    (asking(RDMA, answer("t0", link("d0", transport="rdma"), age=31)), "Unknown", "Unverified"),
    (
        asking(NVLINK_ONLY, answer("t0", link("d0", transport="nvlink"), TOO_SLOW)),
        "False",
        "SlowerThanRequired",
    ),
    (
        asking(RDMA, answer("t0", link("d0", "Refused", reason="vocab_size: 1, 2"))),
        "Unknown",
        "Unverified",
    ),
]


@pytest.mark.parametrize(("found", "truth", "reason"), VERDICTS)
def test_the_fast_path_is_what_all_links_were_measured_to_be(
    found: Scene, truth: str, reason: str
) -> None:
    assert judge(found) == (truth, reason)


def test_a_fall_back_says_on_how_many_links_and_what_is_missing() -> None:
    condition = fast_path(scene(NVLINK, "rdma", "tcp", "nvlink").census)
    assert condition is not None
    assert condition.message == (
        "2 of 3 links run over TCP, NVLink is asked for; the channel that reaches it comes with "
        "the CUDA engine, text is served meanwhile."
    )


def test_a_link_that_was_refused_is_told_with_its_numbers_and_the_fields_to_change() -> None:
    condition = fast_path(asking(NVLINK_ONLY, answer("t0", TOO_SLOW)).census)
    assert condition is not None
    assert condition.message == (
        "t0 and d1: its round trip is 312 us over tcp, at most 1 us are allowed: place the draft "
        "nearer, or raise the limit (transport.require, transport.maxRoundTripMicroseconds)."
    )


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
    assert transport_block(scene(NVLINK, *found).census)["effective"] == effective


def test_a_link_that_is_not_active_says_nothing_of_the_effective_transport() -> None:
    refused = asking(NVLINK_ONLY, answer("t0", TOO_SLOW))
    assert transport_block(refused.census) == {"reason": "tier NVLinkPrivileged, NVLink required"}


def test_the_reason_names_the_card_that_makes_auto_rdma() -> None:
    found = transport_block(scene(Transport(rdma=CARD), "tcp").census)
    assert found == {"effective": "TCP", "reason": "tier Auto with rdma/hca"}
    limited = Transport(max_round_trip_microseconds=9)
    reason = transport_block(scene(limited, "tcp").census)["reason"]
    assert reason == "tier Auto, no fabric asked for"


def test_a_target_that_is_older_than_the_report_runs_over_tcp() -> None:
    assert transport_of(link("d0", transport="")) == "TCP"
    assert transport_of(link("d0", "Connecting", transport="")) == "", "nobody knows yet"

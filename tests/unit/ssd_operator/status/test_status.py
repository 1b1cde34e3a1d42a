"""The status of a resource: its blocks, and its conditions as objects."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.ssd_operator.scenes import (
    NOW,
    Scene,
    answer,
    decided,
    draft,
    link,
    marked,
    target,
    terminating,
    unscheduled,
)

from ssd_operator.api.security import Security, Tls
from ssd_operator.api.spec import Model, Object, Source, TargetSpec
from ssd_operator.observe.pod_state import to_text
from ssd_operator.observe.snapshot import TargetReport
from ssd_operator.policy.apply_failures import Results
from ssd_operator.policy.plan import PassPlan
from ssd_operator.status.condition_rules import HOLD_SECONDS
from ssd_operator.status.pass_result import LONGEST_MESSAGE, Condition, no, yes
from ssd_operator.status.status import merge, status_of, status_of_invalid

STAMP = to_text(NOW)


def derive(scene: Scene) -> Object:
    return status_of(scene.result)


def condition(status: Object, kind: str) -> Object:
    return next(found for found in status["conditions"] if found["type"] == kind)


def test_the_complete_status_of_a_healthy_resource() -> None:
    links = (link("d0", round_trip_seconds=120e-6), link("d1", round_trip_seconds=80.4e-6))
    fact = answer(
        "t0", *links, eligible_sequences=3, tokens_per_round=3.12, hit_rate=0.857, efficiency=0.952
    )
    status = derive(Scene(pools=(fact,)))
    assert status.pop("conditions")[0]["type"] == "Ready"
    assert status == {
        "observedGeneration": 4,
        "endpoint": {"grpc": "demo.default.svc:50051"},
        "model": {"name": "demo"},
        "target": {
            "replicas": 1,
            "readyReplicas": 1,
            "updatedReplicas": 1,
            "summary": "1/1",
            "revision": "r1",
        },
        "draft": {
            "replicas": 2,
            "readyReplicas": 2,
            "activeReplicas": 2,
            "pendingReplicas": 0,
            "drainingReplicas": 0,
            "desiredReplicas": 2,
            "summary": "2/2",
            "revision": "r1",
            "device": "cpu",
            "selector": "ssd.dev/name=demo,ssd.dev/component=draft",
        },
        "transport": {"effective": "TCP"},
        "links": [
            {
                "target": "t0",
                "draft": name,
                "node": "n1",
                "cell": 0,
                "channel": "Grpc",
                "transport": "TCP",
                "roundTripMicroseconds": micros,
                "state": "Active",
            }
            for name, micros in [("d0", 120), ("d1", 80)]
        ],
        "speculation": {
            "state": "Active",
            "tokensPerRound": "3.1",
            "hitRate": "0.86",
            "efficiency": "0.95",
        },
    }


ONE, OTHER = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"


def model_of(*pools: tuple[str, TargetReport], **facts: Any) -> Object:
    pods = (target(), target("t1", cell=1), draft("d0"), draft("d1"))
    block: Object = derive(Scene(cells=2, pods=pods, pools=pools, facts=facts))["model"]
    return block


def test_the_weights_of_all_targets_and_all_linked_drafts_are_reported() -> None:
    dialled = link("", state="Connecting")
    links = (link("d0", draft_weights=OTHER), link("d1", draft_weights=OTHER), dialled)
    first = answer("t0", *links, weights_fingerprint=ONE)
    second = answer("t1", weights_fingerprint=ONE)
    wanted = {"name": "demo", "targetRevision": ONE, "draftRevision": OTHER}
    assert model_of(first, second) == wanted


def test_different_or_unknown_weights_are_not_reported() -> None:
    links = (link("d0", draft_weights=OTHER), link("d1", draft_weights=ONE))
    first = answer("t0", *links, weights_fingerprint=ONE)
    for fingerprint in (OTHER, "", "sha256:1"):
        assert model_of(first, answer("t1", weights_fingerprint=fingerprint)) == {"name": "demo"}


def test_weights_stay_in_the_status_until_all_targets_have_answered() -> None:
    old = {"name": "former", "targetRevision": ONE, "draftRevision": OTHER}
    wanted = {"name": "demo", "targetRevision": ONE, "draftRevision": OTHER}
    same = answer("t0", weights_fingerprint=ONE)
    assert model_of(same, status={"model": old}) == wanted
    other = answer("t0", weights_fingerprint=OTHER)
    changed = {"name": "demo", "draftRevision": OTHER}
    assert model_of(other, status={"model": old}) == changed
    both = (same, answer("t1", weights_fingerprint=ONE))
    assert model_of(*both, status={"model": old}) == {"name": "demo", "targetRevision": ONE}


def test_the_status_of_a_new_resource() -> None:
    status = derive(Scene(pods=(), deployments=(), pools=(), plan=PassPlan()))
    assert condition(status, "Ready")["status"] == "False"
    assert (status["target"]["summary"], status["draft"]["summary"]) == ("0/1", "0/2")
    assert status["links"] == []
    assert "transport" not in status
    assert status["speculation"] == {"state": "NoDrafts"}


def test_replicas_count_exactly_the_pods_of_the_selector() -> None:
    pods = (
        target(),
        draft("d0"),
        marked(draft("d1", ready=False)),
        unscheduled(draft("d2")),
        terminating(draft("d3")),
        draft("d4", cell=1),
    )
    block = derive(Scene(pods=pods))["draft"]
    assert {name: block[name] for name in block if name.endswith("Replicas")} == {
        "readyReplicas": 2,
        "activeReplicas": 2,
        "pendingReplicas": 1,
        "drainingReplicas": 2,
        "desiredReplicas": 2,
    }
    assert block["replicas"] == 4


def test_a_draft_with_several_links_counts_once_and_only_while_its_pod_exists() -> None:
    pools = (answer("t0", link("d0"), link("gone")), answer("t1", link("d0")))
    pods = (target(), target("t1", cell=1), draft("d0"), draft("d1"))
    status = derive(Scene(cells=2, pods=pods, pools=pools))
    assert status["draft"]["summary"] == "1/2"
    assert [(entry["cell"], entry["draft"]) for entry in status["links"]] == [
        (0, "d0"),
        (0, "gone"),
        (1, "d0"),
    ]


def test_links_have_unique_keys_and_are_at_most_64() -> None:
    many = [link("", "Connecting", address=f"10.0.0.{number}:50052") for number in range(80)]
    links = derive(Scene(pools=(answer("t0", *many, many[0]),)))["links"]
    keys = {(entry["target"], entry["draft"]) for entry in links}
    assert len(links) == len(keys) == 64


def test_texts_of_a_target_that_are_too_long_do_not_prevent_the_status() -> None:
    links = [
        link("d0", channel="c" * 200, transport="t" * 200),
        link("d" * 254, transport="t" * 200),
        link("", address="", transport="t" * 200),
    ]
    status = derive(Scene(pools=(answer("t0", *links, dtype="f" * 200),)))
    (entry,) = status["links"]
    assert (len(entry["channel"]), len(entry["transport"])) == (64, 64)
    assert len(status["transport"]["effective"]) == 64
    assert len(status["model"]["targetDtype"]) == 128


def test_an_inactive_link_has_its_reason_and_its_measurements() -> None:
    too_slow = link(
        "d0",
        "Refused",
        reason="link_too_slow: " + "x" * 2000,
        transport="tcp",
        round_trip_seconds=312e-6,
    )
    connecting = link("", "Connecting", address="10.0.0.9:50052")
    entries = derive(Scene(pools=(answer("t0", too_slow, connecting),)))["links"]
    by_draft = {each["draft"]: each for each in entries}
    refused = by_draft["d0"]
    assert (refused["transport"], refused["roundTripMicroseconds"]) == ("TCP", 312)
    assert refused["reason"].startswith("link_too_slow: xxx")
    assert len(refused["reason"]) == 1024
    assert not {"channel", "transport", "reason"} & by_draft["10.0.0.9:50052"].keys()


def test_a_link_without_a_name_is_of_the_pod_that_has_its_address() -> None:
    pods = (target(), draft("d0", podIP="10.0.0.1"))
    links = [link("", "Refused", address=f"10.0.0.{host}:50052") for host in (1, 2)]
    scene = Scene(pods=pods, pools=(answer("t0", *links),))
    nodes = {each["draft"]: each.get("node") for each in derive(scene)["links"]}
    assert nodes == {"d0": "n1", "10.0.0.2:50052": None}


def test_an_active_link_has_its_channel_and_the_reason_for_grpc() -> None:
    reason = "gloo does not connect"
    links = (
        link("d0", channel="collective", transport="P2P/CUMEM"),
        link("d1", channel="grpc", channel_reason=reason),
    )
    entries = derive(Scene(pools=(answer("t0", *links),)))["links"]
    assert [each["channel"] for each in entries] == ["Collective", "Grpc"]
    assert [each.get("reason") for each in entries] == [None, reason]


@pytest.mark.parametrize(
    ("transports", "slowest"),
    [
        (("tcp", "P2P/CUMEM"), "TCP"),
        (("P2P/CUMEM", "SHM/direct"), "SHM/DIRECT"),
        (("NET/IB/0", "NET/Socket/0"), "NET/SOCKET/0"),
        (("new", "P2P/IPC"), "P2P/IPC"),
    ],
)
def test_the_effective_transport_is_the_slowest(transports: tuple[str, str], slowest: str) -> None:
    links = [link(f"d{n}", transport=each) for n, each in enumerate(transports)]
    assert derive(Scene(pools=(answer("t0", *links),)))["transport"]["effective"] == slowest


def figures_of(scene: Scene) -> Object:
    """The measured effect of speculation."""
    block = derive(scene)["speculation"]
    return {name: value for name, value in block.items() if name != "state"}


def test_figures_are_means_weighted_by_running_sequences_and_stay_while_idle() -> None:
    scene = Scene(cells=2, pods=(target(), target("t1", cell=1)))

    def figures(first: int, second: int) -> Object:
        fast = answer("t0", eligible_sequences=first, tokens_per_round=4.0, hit_rate=1.0)
        slow = answer("t1", eligible_sequences=second, tokens_per_round=2.0, hit_rate=0.5)
        return figures_of(replace(scene, pools=(fast, slow)))

    assert figures(9, 1) == {"tokensPerRound": "3.8", "hitRate": "0.95"}
    assert figures(0, 0) == {"tokensPerRound": "3.0", "hitRate": "0.75"}
    old = {"speculation": {"state": "Slower", "tokensPerRound": "3.8", "hitRate": "0.95"}}
    fresh = replace(scene, pools=(answer("t0"),), facts={"status": old})
    assert figures_of(fresh) == {"tokensPerRound": "3.8", "hitRate": "0.95"}


@pytest.mark.parametrize(
    ("pool", "state"),
    [
        (answer("t0", link("d0")), "Active"),
        (answer("t0", link("d0"), speculating=False, speculation_reason="slower"), "Slower"),
        (answer("t0", link("d0", "Quarantined")), "Quarantined"),
        (answer("t0", speculating=False, speculation_reason="slower"), "NoDrafts"),
        (answer("t0", age=31), "TargetUnreachable"),
    ],
)
def test_the_state_of_speculation_is_what_targets_do_not_what_is_linked(
    pool: tuple[str, TargetReport], state: str
) -> None:
    scene = Scene(
        pools=(pool,), pending={name: NOW - seconds for name, seconds in HOLD_SECONDS.items()}
    )
    assert derive(scene)["speculation"]["state"] == state


def test_the_model_name_of_the_spec_is_reported() -> None:
    assert derive(Scene(spec={"model": Model(name="llama")}))["model"] == {"name": "llama"}


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_endpoint_of_vllm_is_its_openai_api(scheme: str) -> None:
    vllm = TargetSpec(source=Source(uri="demo://target"), engine="vllm")
    tls = Tls(target_secret_name="t", draft_secret_name="d") if scheme == "https" else None
    spec = {"target": vllm, "security": Security(tls=tls)}
    endpoint = {"http": f"{scheme}://demo.default.svc:8000/v1"}
    assert derive(Scene(spec=spec))["endpoint"] == endpoint


def test_the_chosen_data_type_is_reported_with_its_reason() -> None:
    packed = answer("t0", dtype="bfloat16", dtype_reason="packed on this CPU")
    plain = answer("t1", dtype="float32", dtype_reason="this CPU cannot pack bfloat16")
    assert model_of(packed) == {
        "name": "demo",
        "targetDtype": "bfloat16",
        "targetDtypeReason": "packed on this CPU",
    }
    both = model_of(packed, plain)
    assert both["targetDtype"] == "bfloat16, float32"
    assert both["targetDtypeReason"] == "packed on this CPU; this CPU cannot pack bfloat16"
    assert model_of(packed, status={"model": both}) == both, "one target has not answered"


def test_outdated_pods_are_counted() -> None:
    scene = Scene(plan=PassPlan(revisions={"demo-target-0": "r2"}))
    block = derive(scene)["target"]
    assert (block["updatedReplicas"], block["revision"]) == (0, "r2")


def test_the_time_of_a_scaling_is_kept_until_the_next() -> None:
    up = decided(3, "ScaleUp")
    block = derive(Scene(plan=up, results=Results(is_scaled=True)))["draft"]
    found = {name: block[name] for name in ("lastScaleTime", "lastScaleReason")}
    assert found == {"lastScaleTime": STAMP, "lastScaleReason": "ScaleUp"}
    before = {"draft": {"lastScaleTime": "then", "lastScaleReason": "ScaleUp"}}
    block = derive(Scene(plan=up, facts={"status": before}))["draft"]
    assert block["lastScaleTime"] == "then"


PROBLEM = "spec.target is missing."


def test_conditions_of_an_unreadable_resource_are_unknown() -> None:
    old = derive(Scene())
    new = status_of_invalid(old, 5, PROBLEM, NOW + 9)
    assert condition(new, "SpecValid")["reason"] == "SpecInvalid"
    others = [each for each in new["conditions"] if each["type"] != "SpecValid"]
    assert {each["type"] for each in others} == {each["type"] for each in old["conditions"]} - {
        "SpecValid"
    }
    assert {each["status"] for each in others} == {"Unknown"}
    assert new["observedGeneration"] == 5
    assert new["draft"] == old["draft"]
    assert old["speculation"]["state"] == "Active"
    assert new["speculation"] == old["speculation"] | {"state": "SpecInvalid"}


def test_a_spec_that_cannot_be_read_changes_no_condition_of_another_writer() -> None:
    old = derive(Scene())
    theirs = {"type": "example.com/Audited", "status": "True", "reason": "Done"}
    with_theirs = old | {"conditions": [*old["conditions"], theirs]}
    new = status_of_invalid(with_theirs, 5, PROBLEM, NOW)
    assert new == status_of_invalid(old, 5, PROBLEM, NOW)


@pytest.mark.parametrize("old", [{}, {"conditions": [{"type": "Ready", "status": "False"}]}])
def test_an_unreadable_resource_that_never_served_is_not_ready(old: Object) -> None:
    new = status_of_invalid(old, 1, PROBLEM, NOW)
    assert {found["type"]: found["reason"] for found in new["conditions"]} == {
        "Ready": "SpecInvalid",
        "SpecValid": "SpecInvalid",
    }


def test_the_round_trip_is_the_lowest_while_a_link_is_active() -> None:
    status: Object = {}
    shown = []
    for state, micros in [
        *(("Active", 1100), ("Active", 4800), ("Active", 560), ("Active", 550), ("Active", 900)),
        *(("Lost", 0), ("Active", 4000)),
    ]:
        pool = answer("t0", link("d0", state, round_trip_seconds=micros / 1e6))
        status = derive(Scene(pools=(pool,), facts={"status": status}))
        shown.append(status["links"][0]["roundTripMicroseconds"])
    assert shown == [1100, 1100, 1100, 550, 550, 0, 4000]


THEN, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
some_conditions = st.dictionaries(
    st.sampled_from("ABC"),
    st.builds(Condition, st.sampled_from(["True", "False", "Unknown"]), st.text(), st.text()),
)


def test_a_condition_has_the_generation_that_it_describes() -> None:
    assert merge({}, {"Ready": yes("Serving", "1 of 1 targets serve.")}, 4, LATER) == [
        {
            "type": "Ready",
            "status": "True",
            "reason": "Serving",
            "message": "1 of 1 targets serve.",
            "observedGeneration": 4,
            "lastTransitionTime": LATER,
        }
    ]


@given(some_conditions, some_conditions)
def test_the_time_changes_only_with_the_status_and_old_conditions_are_dropped(
    old: dict[str, Condition], new: dict[str, Condition]
) -> None:
    merged = merge({"conditions": merge({}, old, 1, THEN)}, new, 2, LATER)
    assert [found["type"] for found in merged] == list(new)
    for found in merged:
        before = old.get(found["type"])
        is_same = before is not None and before.status == found["status"]
        assert found["lastTransitionTime"] == (THEN if is_same else LATER)


def test_a_long_message_is_cut() -> None:
    (found,) = merge({}, {"Ready": no("X", "y" * 5000)}, 1, LATER)
    assert len(found["message"]) == LONGEST_MESSAGE

"""Which ports and labels the Services of targets have while cells change their engine."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.unit.ssd_operator.resources import LLAMA, deployments, resource
from tests.unit.ssd_operator.scenes import target

from ssd_operator.api.spec import Resource
from ssd_operator.observe.cluster import ref_of
from ssd_operator.observe.snapshot import Snapshot
from ssd_operator.policy.services import keeps_ports, labels_fit

NOW = 1_000_000.0
CELLS = range(3)
SOME_CELLS = [tuple(each) for size in (0, 1, 2, 3) for each in itertools.combinations(CELLS, size)]
OF_ENGINE: dict[str, Resource] = {
    engine: resource(LLAMA.changed(target=LLAMA.target.changed(engine=engine, replicas=len(CELLS))))
    for engine in ("ssd", "vllm")
}
WANTED = deployments(OF_ENGINE["vllm"], "target")


def running_engines(engines: Sequence[str], labels: Sequence[str | None] = ()) -> Snapshot:
    """Cells of a resource of engine vllm, by the engine that each runs.

    ``labels`` are those of the Deployments' templates, then of the pods.
    """
    found = [deployments(OF_ENGINE[each], "target")[cell] for cell, each in enumerate(engines)]
    templates = [copy.deepcopy(each["spec"]["template"]) for each in (*found, *found)]
    for template, label in zip(templates, labels, strict=False):
        template["metadata"]["labels"] |= {"ssd.dev/engine": label}
    live = [
        each | {"spec": each["spec"] | {"template": template}}
        for each, template in zip(found, templates, strict=False)
    ]
    pods = [
        copy.deepcopy(template | {"status": target()["status"]})
        for template in templates[len(found) :]
    ]
    for cell, each in enumerate(pods):
        each["metadata"]["name"] = f"t{cell}"
    children = {ref_of(each): each for each in live}
    return Snapshot(resource=OF_ENGINE["vllm"], now=NOW, children=children, pods=tuple(pods))


def with_wrapped_commands(snapshot: Snapshot) -> Snapshot:
    """The same after a webhook for secrets: another program, which gets the command."""
    wrapped = copy.deepcopy(snapshot)
    templates = [each["spec"]["template"] for each in wrapped.children.values()]
    for each in (*templates, *wrapped.pods):
        for container in each["spec"]["containers"]:
            container["args"] = [*container.pop("command"), *container.get("args", ())]
            container["command"] = ["/vault/vault-env"]
    return wrapped


def keeps(snapshot: Snapshot, ready: Sequence[int], held: Sequence[int]) -> bool:
    """Whether Services keep the former ports, by the cells that serve and those that wait."""
    refs = list(snapshot.children)
    pods = tuple(snapshot.pods[cell] for cell in ready)
    waiting = frozenset(refs[cell] for cell in held)
    return keeps_ports(WANTED, replace(snapshot, pods=pods), waiting)


@pytest.mark.parametrize(
    ("engines", "labels", "is_fit"),
    [
        ((), (), True),
        (("vllm", "vllm"), (), True),
        (("vllm", "ssd"), (), True),
        (("vllm", "ssd"), ("vllm", None, "vllm", "other"), True),
        (("vllm", "ssd"), ("vllm", "vllm", "vllm", "ssd"), False),
        (("vllm", "vllm"), ("vllm", None, "vllm", "vllm"), False),
        (("vllm", "vllm"), ("vllm", "vllm", "vllm", None), False),
        (("vllm", "vllm"), ("vllm", "vllm", "vllm", "other"), False),
    ],
)
def test_services_select_the_label_of_an_engine_if_exactly_its_targets_have_it(
    engines: Sequence[str], labels: Sequence[str | None], *, is_fit: bool
) -> None:
    snapshot = running_engines(engines, labels)
    assert labels_fit(snapshot) is is_fit
    assert labels_fit(with_wrapped_commands(snapshot)) is is_fit


@pytest.mark.parametrize(
    ("engines", "ready", "held", "is_kept"),
    [
        (("ssd",), (0,), (), True),  # its new Deployment is refused
        (("ssd",), (), (), True),  # the same, while its container restarts
        (("vllm",), (), (), False),
        (("ssd", "ssd"), (0, 1), (1,), True),
        (("vllm", "ssd"), (1,), (1,), True),
        (("vllm", "ssd"), (0, 1), (1,), True),  # the preflight of the last cell runs
        (("vllm", "ssd"), (0, 1), (), False),
        (("vllm", "ssd"), (1,), (), True),
        (("vllm", "ssd"), (0,), (1,), False),  # the former one that waits is down
        (("vllm", "ssd"), (), (1,), True),
        (("vllm", "ssd", "ssd"), (0, 2), (2,), True),  # the second one rolls
        (("vllm", "ssd", "ssd"), (0, 1, 2), (), True),
        (("vllm", "vllm", "ssd"), (0, 1, 2), (2,), False),  # more new ones than former ones
        (("vllm", "vllm"), (1,), (0,), False),  # another change of the new targets
    ],
)
def test_services_keep_a_former_engine_that_is_left_until_a_new_target_takes_over(
    engines: Sequence[str], ready: Sequence[int], held: Sequence[int], *, is_kept: bool
) -> None:
    snapshot = running_engines(engines)
    assert keeps(snapshot, ready, held) is is_kept
    assert keeps(with_wrapped_commands(snapshot), ready, held) is is_kept


@pytest.mark.parametrize("engines", [*itertools.product(("ssd", "vllm"), repeat=len(CELLS))])
def test_services_lead_to_a_target_that_serves_if_there_is_one(engines: Sequence[str]) -> None:
    snapshot = running_engines(engines)
    for ready, held in itertools.product(SOME_CELLS, SOME_CELLS):
        selected = "ssd" if keeps(snapshot, ready, held) else "vllm"
        assert not ready or selected in {engines[cell] for cell in ready}

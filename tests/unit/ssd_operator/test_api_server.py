"""Calls as an API server sees them, with its answers put into our mouth."""

import json
from dataclasses import dataclass, field
from typing import Any

from ssd_operator.api_server import ApiServer
from ssd_operator.spec import KIND, Object


@dataclass
class Answer:
    content: Object
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    async def read(self) -> bytes:
        return json.dumps(self.content).encode()


@dataclass
class Api:
    """A client that answers in order and keeps what was asked."""

    answers: list[Answer]
    calls: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    async def call_api(self, path: str, verb: str, **options: Any) -> Answer:
        self.calls.append((path, dict(options["query_params"])))
        return self.answers.pop(0)


def page(*uids: str, more: str = "") -> Answer:
    items = [{"metadata": {"uid": uid}} for uid in uids]
    # A list of metadata without any is null.
    return Answer({"metadata": {"continue": more}, "items": items or None})


async def test_a_list_of_nothing_has_no_uids() -> None:
    assert await ApiServer(Api([page()])).uids("Pod", "") == frozenset()  # type: ignore[arg-type]


async def test_all_pages_of_a_list_are_read_and_only_of_what_is_ours() -> None:
    api = Api([page("a", more="next"), page("b")])
    found = await ApiServer(api).uids("Pod", "default")  # type: ignore[arg-type]
    assert found == {"a", "b"}
    path, query = api.calls[1]
    assert path == "/api/v1/namespaces/default/pods"
    assert query["continue"] == "next"
    assert query["labelSelector"] == "app.kubernetes.io/managed-by=ssd-operator"


async def test_resources_are_listed_whatever_their_labels() -> None:
    api = Api([page("a")])
    assert await ApiServer(api).uids(KIND, "") == {"a"}  # type: ignore[arg-type]
    path, query = api.calls[0]
    assert path == "/apis/ssd.dev/v1alpha1/ssddeployments"
    assert "labelSelector" not in query

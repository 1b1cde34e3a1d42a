"""``gateway.enabled``: a gateway with keys from a Secret serves OpenAI's client in the cluster."""

import hashlib
from collections.abc import Iterator

import openai
import pytest
from tests.cluster.kube import Kube, eventually, sample

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
NAME = "fronted"
SELECTOR = f"ssd.dev/name={NAME},ssd.dev/component=gateway"
TARGETS = f"ssd.dev/name={NAME},ssd.dev/component=target"
KINDS = ("serviceaccount", "networkpolicy", "service", "deployment")


def key_file(*keys: str) -> str:
    return "".join(f"k:{hashlib.sha256(key.encode()).hexdigest()}\n" for key in keys)


@pytest.fixture(scope="module")
def fronted(kube: Kube) -> Iterator[str]:
    """A ready resource with a gateway; the address of its Service for this machine."""
    resource = sample(NAME, drafts=0)
    keys = {"name": "keys", "key": "file"}
    resource["spec"]["gateway"] = {"enabled": True, "apiKeysSecretRef": keys}
    kube("create", "secret", "generic", "keys", f"--from-literal=file={key_file('first')}")
    try:
        with kube.applied(resource):
            kube.wait_for(NAME, "GatewayReady", "True", "AllReady", timeout=180)
            service = kube.get("service", f"{NAME}-gateway")
            yield f"http://{service['spec']['clusterIP']}:8000"
    finally:
        kube("delete", "secret", "keys", "--ignore-not-found")


def client(base: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base}/v1", api_key=key)


def test_a_client_with_a_key_is_served_and_others_are_not(fronted: str) -> None:
    with client(fronted, "first") as mine:
        answer = mine.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": "Add two numbers."}], max_tokens=8
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8
        stream = mine.completions.create(model=NAME, prompt="x", max_tokens=8, stream=True)
        assert "".join(part.choices[0].text for part in stream)
    with client(fronted, "other") as other, pytest.raises(openai.AuthenticationError):
        other.models.list()


def test_a_changed_secret_changes_the_keys_without_a_restart(kube: Kube, fronted: str) -> None:
    pods = [each["metadata"]["uid"] for each in kube.items("pods", "-l", SELECTOR)]
    change = {"stringData": {"file": key_file("second")}}
    kube("patch", "secret", "keys", "--type=merge", "-p", str(change).replace("'", '"'))

    def is_accepted() -> bool:
        try:
            with client(fronted, "second") as mine:
                return bool(mine.models.list().data)
        except openai.AuthenticationError:
            return False

    # The kubelet updates volumes of Secrets once a minute or two.
    eventually(is_accepted, "the second key is accepted", 150)
    with client(fronted, "first") as former, pytest.raises(openai.AuthenticationError):
        former.models.list()
    assert [each["metadata"]["uid"] for each in kube.items("pods", "-l", SELECTOR)] == pods


@pytest.mark.usefixtures("fronted")
def test_a_new_gateway_that_does_not_start_is_reported_while_the_old_one_serves(
    kube: Kube,
) -> None:
    kube.edit_spec(NAME, gateway={"image": "localhost/absent:1"})
    kube.wait_for(NAME, "Progressing", "True", "RollingOut", "cannot pull localhost/absent:1", 60)
    assert kube.has(NAME, "GatewayReady", "True", "AllReady")
    kube.edit_spec(NAME, gateway={"image": None})
    kube.wait_for(NAME, "Progressing", "True", "UpToDate", timeout=60)


def test_two_gateways_have_a_budget_and_none_is_left_when_they_are_disabled(
    kube: Kube, fronted: str
) -> None:
    kube("patch", "ssd", NAME, "--type=merge", "-p", '{"spec":{"gateway":{"replicas":2}}}')
    kube.wait_for(NAME, "GatewayReady", "True", "AllReady", words="2 of 2", timeout=120)
    assert kube.get("poddisruptionbudget", f"{NAME}-gateway")["spec"]["maxUnavailable"] == 1
    targets = [each["metadata"]["uid"] for each in kube.items("pods", "-l", TARGETS)]
    kube("patch", "ssd", NAME, "--type=merge", "-p", '{"spec":{"gateway":{"enabled":false}}}')

    def are_gone() -> bool:
        names = [f"{kind}/{NAME}-gateway" for kind in (*KINDS, "poddisruptionbudget")]
        return all(kube.attempt("get", name).returncode != 0 for name in names)

    eventually(are_gone, "the objects of the gateway are gone", 30)
    assert [each["metadata"]["uid"] for each in kube.items("pods", "-l", TARGETS)] == targets

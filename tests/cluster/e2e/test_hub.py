"""Models of a hub, which is a pod of the cluster: fetched with a token, then served.

The small model has four attention heads, so that also four ranks can serve it.
"""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests import hub
from tests.cluster.kube import Kube, Object, eventually, image_of, sample

from ssd.testing.tiny_folder import write_tiny_folder

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]
PORT = 8000
ANSWER = ("ssd", "generate", "Once", "--json", "--max-tokens", "8")
NUM_GPUS = 4
RANKS = """
import json, pathlib
found = {}
for each in pathlib.Path("/proc").glob("[0-9]*"):
    words = (each / "cmdline").read_bytes().decode().split(chr(0))
    if "--rank" in words:
        found[words[words.index("--rank") + 1]] = int(each.name)
print(json.dumps(found))
"""
"""Prints rank and process id of the ranks that a target has started."""


@pytest.fixture(scope="module")
def endpoint(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the hub, which requires the token of Secret ``hub``."""
    folder = write_tiny_folder(tmp_path_factory.mktemp("hub") / "model")
    files = {each.name: each.read_bytes() for each in folder.iterdir()}
    encoded = {name: base64.b64encode(body).decode() for name, body in files.items()}
    named = {"apiVersion": "v1", "metadata": {"name": "hub"}}
    kube.apply({**named, "kind": "Secret", "stringData": {"token": hub.TOKEN}})
    program = {"hub.py": Path(hub.__file__).read_text()}
    kube.apply({**named, "kind": "ConfigMap", "data": program, "binaryData": encoded})
    kube.apply(hub_pod())
    kube("expose", "pod", "hub", f"--port={PORT}")
    kube.wait("pod/hub", "condition=Ready")
    yield f"http://hub.{kube.namespace}:{PORT}"
    kube("delete", "pod/hub", "service/hub", "configmap/hub", "secret/hub", "--wait=false")


def hub_pod() -> Object:
    container = {
        "name": "hub",
        "image": image_of("target"),
        "command": ["python", "/hub/hub.py", "/hub", str(PORT)],
        "volumeMounts": [{"name": "hub", "mountPath": "/hub"}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
    }
    volumes = [{"name": "hub", "configMap": {"name": "hub"}}]
    spec = {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0}
    metadata = {"name": "hub", "labels": {"app": "hub"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def of_the_hub(name: str, endpoint: str, revision: str = hub.COMMIT) -> Object:
    """A resource whose target and draft have the same model of the hub."""
    document = sample(name, drafts=1)
    source: Object = {"uri": f"hf://{hub.NAME}", "revision": revision}
    source |= {"tokenSecretRef": {"name": "hub", "key": "token"}}
    document["spec"]["podTemplate"] = {"env": [{"name": "HF_ENDPOINT", "value": endpoint}]}
    for component in ("target", "draft"):
        document["spec"][component] |= {"source": source}
    return document


def test_weights_are_fetched_with_a_token_that_engines_do_not_have(
    kube: Kube, endpoint: str, in_cluster: Callable[..., str]
) -> None:
    with kube.applied(of_the_hub("tiny", endpoint)):
        kube.wait_ready("tiny")
        kube.wait_linked("tiny", 1)
        output = in_cluster(*ANSWER, "--endpoint", f"tiny.{kube.namespace}:50051")
        assert json.loads(output)["token_ids"]
        for component in ("target", "draft"):
            (pod,) = kube.pods("tiny", component)
            name = pod["metadata"]["name"]
            variables = kube("exec", name, "--", "env")
            assert "HF_HUB_OFFLINE=1" in variables
            assert hub.TOKEN not in variables
            write = ("sh", "-c", "touch /var/cache/ssd/hf/x 2>&1 || true")
            assert "Read-only file system" in kube("exec", name, "--", *write)


def test_a_model_that_the_hub_does_not_have_is_reported_in_the_condition(
    kube: Kube, endpoint: str
) -> None:
    with kube.applied(of_the_hub("none", endpoint, revision="f" * 40)):
        kube.wait_for("none", "TargetReady", "False", words="not this revision")


def on_gpus(name: str, endpoint: str) -> Object:
    """The same on the pretend GPUs of the cluster's node, where processes run on CPUs."""
    document = of_the_hub(name, endpoint)
    spec = document["spec"]
    spec |= {"accelerator": "nvidia", "model": {"dtype": "float32"}}
    small = {"requests": {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "64Mi"}}
    spec["target"]["tensorParallelSize"] = NUM_GPUS
    for component in ("target", "draft"):
        device = {"name": f"SSD_{component.upper()}_DEVICE", "value": "cpu"}
        spec[component] |= {"resources": small, "podTemplate": {"env": [device]}}
    return document


def test_a_target_on_four_gpus_serves_with_four_ranks_and_returns_after_one_is_killed(
    kube: Kube, endpoint: str, in_cluster: Callable[..., str]
) -> None:
    greedy = (*ANSWER, "--temperature", "0", "--endpoint")
    with kube.applied(on_gpus("ranks", endpoint)):
        kube.wait_ready("ranks")
        kube.wait_linked("ranks", 1)
        (target,) = kube.pods("ranks", "target")
        (draft,) = kube.pods("ranks", "draft")
        pod = target["metadata"]["name"]
        assert num_gpus(target) == NUM_GPUS
        assert num_gpus(draft) == 1
        assert len(ranks_of(kube, pod)) == NUM_GPUS - 1, "rank 0 is the target"
        output = json.loads(in_cluster(*greedy, f"ranks.{kube.namespace}:50051"))
        kube("exec", pod, "--", "sh", "-c", f"kill -9 {ranks_of(kube, pod)['2']}")
        eventually(lambda: "rank 2" in last_message(kube, pod), "the pod names the rank", 30)
        # The resource may have the condition from before the kill still.
        eventually(lambda: kube.num_ready("ranks", "target") == 1, "the pod is ready again", 120)
        kube.wait_ready("ranks")
    alone = of_the_hub("alone", endpoint)
    alone["spec"]["model"] = {"dtype": "float32"}
    with kube.applied(alone):
        kube.wait_ready("alone")
        expected = json.loads(in_cluster(*greedy, f"alone.{kube.namespace}:50051"))
    assert output["token_ids"] == expected["token_ids"]


def ranks_of(kube: Kube, pod: str) -> dict[str, int]:
    """Rank to process id of the ranks that the target of a pod has started."""
    found: dict[str, int] = json.loads(kube("exec", pod, "--", "python", "-c", RANKS))
    return found


def num_gpus(pod: Object) -> int:
    (container,) = pod["spec"]["containers"]
    return int(container["resources"]["limits"]["nvidia.com/gpu"])


def last_message(kube: Kube, pod: str) -> str:
    """Why the container of a pod ended the last time."""
    (status,) = kube.get("pod", pod)["status"]["containerStatuses"]
    return str(status["lastState"]["terminated"]["message"])

"""The chart's samples that no API server checks."""

from pathlib import Path

import pytest
import yaml
from tests.unit.ssd_operator.resources import template_of

from ssd_operator.api.parse import parse
from ssd_operator.children.objects import ENGINES, Component

SAMPLES = Path(__file__).resolve().parents[3] / "charts" / "ssd" / "samples"


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_a_pod_that_two_jobs_scrape_counts_once(name: str) -> None:
    sample = (SAMPLES / "scaling" / f"{name}.yaml").read_text()
    assert "sum(max by (namespace, pod) (" in sample


@pytest.mark.parametrize("component", ENGINES)
def test_the_job_fetches_what_the_pods_of_the_sample_would_fetch(component: Component) -> None:
    sample = yaml.safe_load((SAMPLES / "llama-3.1-70b.yaml").read_text())
    sample["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1}
    pod = template_of(parse(sample), component)["spec"]
    (fetch,) = pod["initContainers"]
    job = yaml.safe_load((SAMPLES / "jobs" / "fetch-weights.yaml").read_text())
    own = job["spec"]["template"]["spec"]
    (container,) = [each for each in own["containers"] if each["name"] == component]
    assert container["command"] == fetch["command"]
    variables = [each for each in fetch["env"] if each["name"] != "SSD_FETCH_TERMINATION_LOG"]
    assert sorted(map(str, container["env"])) == sorted(map(str, variables))
    assert container["volumeMounts"] == fetch["volumeMounts"]
    assert container["securityContext"] == fetch["securityContext"]
    assert own["volumes"][1] in pod["volumes"]
    context = {key: own["securityContext"][key] for key in ("runAsUser", "fsGroup")}
    assert context.items() <= pod["securityContext"].items()
    assert "resources" not in container, "no GPU is requested"

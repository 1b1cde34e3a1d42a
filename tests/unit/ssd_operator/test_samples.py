"""The chart's samples that no API server checks."""

from pathlib import Path

import pytest
import yaml
from tests.unit.ssd_operator.resources import TWO_CELLS, template_of

from ssd_operator.children.objects import ENGINES, Component

SAMPLES = Path(__file__).resolve().parents[3] / "charts" / "ssd" / "samples"


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_a_pod_that_two_jobs_scrape_counts_once(name: str) -> None:
    sample = (SAMPLES / "scaling" / f"{name}.yaml").read_text()
    assert "sum(max by (namespace, pod) (" in sample


@pytest.mark.parametrize("component", ENGINES)
def test_the_job_fetches_what_the_pods_of_the_sample_would_fetch(component: Component) -> None:
    pod = template_of(TWO_CELLS, component)["spec"]
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

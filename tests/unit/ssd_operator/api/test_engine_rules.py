"""Which arguments of vLLM a target accepts, by the patterns of the rules."""

import re
from fnmatch import fnmatch

import pytest
import yaml
from tests.unit.ssd_operator.resources import CORPUS, ROOT

from ssd.model_files.model_source import WANTED
from ssd_operator.api.engine_rules import VLLM_ARGS_RULES, VLLM_RULES
from ssd_operator.api.spec import Object

_RULE = re.compile(r"!self\.exists\(a, a\.matches\('([^']*)'\)\)")
BAD = yaml.safe_load((ROOT / "tests" / "cluster" / "crd" / "bad.yaml").read_text())["cases"]
ARGS_CASES = [case for name, case in BAD.items() if name.startswith("vllm-args-")]


def refusals(args: list[str]) -> list[str]:
    """Messages of the rules that refuse arguments. RE2 and ``re`` read these patterns alike."""
    patterns = [(_RULE.fullmatch(rule), message) for rule, message in VLLM_ARGS_RULES]
    assert all(pattern for pattern, _ in patterns)
    return [
        message
        for pattern, message in patterns
        if pattern and any(re.search(pattern[1], arg) for arg in args)
    ]


@pytest.mark.parametrize("case", ARGS_CASES, ids=lambda case: case["cpu"]["target"]["args"][0])
def test_each_case_of_an_api_server_is_refused_by_one_rule(case: Object) -> None:
    (message,) = refusals(case["cpu"]["target"]["args"])
    assert case["message"] in message


@pytest.mark.parametrize(
    "word", ["-n", "-n=2", "-n2", "-n16", "--nnodes=2", "-pp=2", "-dp", "-dpl=2", "-pcp=2", "-pc"]
)
def test_a_target_has_one_node_and_one_replica_of_its_model(word: str) -> None:
    (message,) = refusals([word])
    assert "leave pipeline, data and prefill-context parallel arguments out" in message


@pytest.mark.parametrize(
    "word",
    ["--tensor_parallel_size=2", "-tp", "-tp=2", "-t", "-sc", "-s", "-s.num_speculative_tokens=3"],
)
def test_an_argument_that_a_field_sets_is_refused_under_each_of_its_names(word: str) -> None:
    (message,) = refusals([word])
    assert "fields of the resource set these arguments" in message


@pytest.mark.parametrize("word", ["--host", "--host=127.0.0.1", "--port=1", "--uds=/x", "--ssl_ca"])
def test_the_address_of_the_probes_and_of_the_service_stays(word: str) -> None:
    (message,) = refusals([word])
    assert "are the operator's" in message


def test_other_arguments_are_accepted() -> None:
    good = yaml.safe_load((CORPUS / "vllm.yaml").read_text())["spec"]["target"]["args"]
    others = ["--num-gpu-blocks-override=8", "--no-enable-prefix-caching", "-q", "--tokenizer=x"]
    assert refusals([*good, *others]) == []


def test_a_model_of_the_hub_whose_code_is_not_fetched_is_refused() -> None:
    assert not any(fnmatch("modeling_own.py", pattern) for pattern in WANTED)
    (rule,) = [rule for rule, message in VLLM_RULES if "pvc://claim/path" in message]
    sources = re.findall(r"!self\.target\.source\.uri\.startsWith\('([^']*)'\)", rule)
    (pattern,) = re.findall(r"!self\.target\.args\.exists\(a, a\.matches\('([^']*)'\)\)", rule)
    assert sources == ["hf://"]
    assert re.search(pattern, "--trust-remote-code")
    assert re.search(pattern, "--trust_remote_code")
    assert not re.search(pattern, "--no-trust-remote-code")

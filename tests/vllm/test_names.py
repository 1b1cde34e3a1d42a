"""What the plugin reads of vLLM, replaces and is given, in the sources of the installed vLLM.

``ssd_vllm.worker`` checks functions at start. A name of another kind would fail in a step.
"""

import ast
import inspect
from collections.abc import Iterable, Iterator

import pytest
from tests.vllm.server import PYTHON, ROOT

from ssd_vllm.proposer import Proposer

pytestmark = pytest.mark.vllm
RUNNER = "v1/worker/gpu_model_runner.py GPUModelRunner"
WORKER = "v1/worker/gpu_worker.py Worker"
READ = {
    "config/vllm.py VllmConfig": (
        *("additional_config", "model_config", "parallel_config", "scheduler_config"),
        *("speculative_config", "use_v2_model_runner"),
    ),
    "config/model.py ModelConfig": (
        *("dtype", "get_vocab_size", "hf_token", "max_model_len", "model", "tokenizer"),
        "tokenizer_revision",
    ),
    "config/parallel.py ParallelConfig": (
        *("data_parallel_index", "data_parallel_size", "distributed_executor_backend"),
        *("pipeline_parallel_size", "world_size"),
    ),
    "config/scheduler.py SchedulerConfig": ("max_num_seqs",),
    "config/speculative.py SpeculativeConfig": ("method", "model", "num_speculative_tokens"),
    "distributed/parallel_state.py GroupCoordinator": ("broadcast_object", "is_first_rank"),
    "model_executor/models/interfaces_base.py VllmModelForTextGeneration": ("compute_logits",),
    "sampling_params.py SamplingParams": (
        *("all_stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "seed", "temperature"),
        *("thinking_token_budget", "top_k"),
    ),
    "v1/core/sched/output.py NewRequestData": (
        *("lora_request", "prompt_token_ids", "req_id", "sampling_params"),
    ),
    "v1/core/sched/output.py SchedulerOutput": (
        *("finished_req_ids", "num_scheduled_tokens", "preempted_req_ids", "scheduled_new_reqs"),
        "scheduled_spec_decode_tokens",
    ),
    "v1/sample/metadata.py SamplingMetadata": ("all_greedy",),
    "v1/sample/sampler.py Sampler": ("logprobs_mode", "topk_topp_sampler"),
    "v1/sample/thinking_budget_state.py ThinkingBudgetStateHolder": ("_state",),
    "v1/spec_decode/metadata.py SpecDecodeMetadata": ("num_draft_tokens",),
    "v1/worker/gpu_input_batch.py CachedRequestState": ("sampling_params",),
    "v1/worker/gpu_input_batch.py InputBatch": (
        *("generators", "num_reqs", "num_tokens_no_spec", "req_ids", "token_ids_cpu"),
        "thinking_budget_state_holder",
    ),
    RUNNER: (
        *("_dummy_run", "_sample", "drafter", "effective_drafter_max_model_len", "execute_model"),
        *("input_batch", "lora_config", "max_model_len", "max_num_tokens", "model"),
        *("num_spec_tokens", "requests", "sampler"),
    ),
    WORKER: ("model_runner",),
    "v1/worker/worker_base.py WorkerBase": ("scheduler_config", "vllm_config"),
}
"""Fields, methods and attributes of classes."""


def class_of(path: str, name: str) -> ast.ClassDef:
    # Not at import: the environment may be absent, and pytest imports tests that it deselects.
    (vllm,) = PYTHON.parents[1].glob("lib/python*/site-packages/vllm")
    (found,) = classes_of((vllm / path).read_text(), name)
    return found


def classes_of(source: str, name: str) -> Iterator[ast.ClassDef]:
    for each in ast.walk(ast.parse(source)):
        if isinstance(each, ast.ClassDef) and each.name == name:
            yield each


def members_of(class_: ast.ClassDef) -> Iterator[str]:
    for each in class_.body:
        match each:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
    for node in ast.walk(class_):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def methods_of(class_: ast.ClassDef) -> dict[str, list[str]]:
    """Return the names of the parameters of each method, without those after a star."""
    functions = [each for each in class_.body if isinstance(each, ast.FunctionDef)]
    return {each.name: [one.arg for one in each.args.args] for each in functions}


def calls_of(class_: ast.ClassDef, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(class_):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(function):
            yield node


def last_names(expressions: Iterable[ast.expr]) -> Iterator[str]:
    """Return the part after the last dot of each expression."""
    return (ast.unparse(each).rpartition(".")[2] for each in expressions)


@pytest.mark.parametrize("place", READ)
def test_what_is_read_exists(place: str) -> None:
    assert set(READ[place]) - set(members_of(class_of(*place.split()))) == set()


def test_overridden_methods_have_the_parameters_of_vllms() -> None:
    (ours,) = classes_of((ROOT / "services/ssd_vllm/worker.py").read_text(), "Worker")
    of_vllm = methods_of(class_of(*WORKER.split()))
    overridden = {name: given for name, given in methods_of(ours).items() if name[0] != "_"}
    assert len(overridden) > 3
    assert overridden == {name: of_vllm.get(name) for name in overridden}


@pytest.mark.parametrize(
    ("place", "function", "given"),
    [
        (RUNNER, "self._sample", ("logits", "spec_decode_metadata")),
        (WORKER, "model_runner.execute_model", ("scheduler_output", "intermediate_tensors")),
        (
            "v1/sample/sampler.py Sampler",
            "self.topk_topp_sampler",
            ("logits", "generators", "top_k", "top_p"),
        ),
        (
            "v1/sample/rejection_sampler.py RejectionSampler",
            "rejection_sample",
            (
                *("draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens"),
                *("draft_probs", "target_logits", "bonus_token_ids", "sampling_metadata"),
            ),
        ),
    ],
)
def test_replaced_functions_are_called_with_what_the_plugin_reads(
    place: str, function: str, given: tuple[str, ...]
) -> None:
    (call,) = calls_of(class_of(*place.split()), function)
    assert tuple(last_names(call.args)) == given


def test_the_proposer_is_called_with_its_parameters() -> None:
    # vLLM casts only proposers of unknown classes.
    (call,) = calls_of(class_of(*RUNNER.split()), "self.drafter).propose")
    named = {each.arg: each.value for each in call.keywords if each.arg}
    assert [*last_names(call.args), *named] == [*inspect.signature(Proposer.propose).parameters][1:]
    assert [*last_names(named.values())] == [*named]


def test_a_thinking_has_the_state_that_is_set() -> None:
    holder = class_of("v1/sample/thinking_budget_state.py", "ThinkingBudgetStateHolder")
    assert "'bonus_token_forced': False" in ast.unparse(holder)


def test_the_row_after_a_proposal_is_chosen_by_the_attribute_that_is_replaced() -> None:
    sampler = class_of("v1/sample/ops/topk_topp_sampler.py", "TopKTopPSampler")
    assert "forward" in members_of(sampler)
    choices = [given for name, given in methods_of(sampler).items() if name.startswith("forward_")]
    assert len(choices) > 1
    assert all(given == ["self", "logits", "generators", "k", "p"] for given in choices)

"""vLLM as the target of a pool of drafts: a proposer and a worker for vLLM's own servers.

    vllm serve MODEL --worker-cls ssd_vllm.Worker
      --speculative-config '{"method": "custom_class", "model": "ssd_vllm.Proposer",
                             "num_speculative_tokens": 6}'
      --additional-config '{"ssd": {"drafts": ["draft:50052"]}}'

vLLM schedules, runs the model, samples and serves. ``Worker`` gives ``Proposer`` the requests of
each step, and replaces vLLM's random choices by choices with the noise that drafts compute too
(``coupled_sampling``).
"""

from importlib import import_module
from typing import Any

from ssd_vllm.versions import check_version

_HOMES = {
    "Gate": "ssd_vllm.gate",
    "Proposer": "ssd_vllm.proposer",
    "Worker": "ssd_vllm.worker",
}


def __getattr__(name: str) -> Any:
    """Import a class when vLLM asks for it: the settings need no vLLM.

    Raises:
        SetupError: the plugin does not support this version of vLLM.
    """
    if name not in _HOMES:
        raise AttributeError(f"ssd_vllm has no {name}")
    if name == "Worker":
        # Before the import of names that other versions do not have.
        check_version(import_module("vllm").__version__)
    return getattr(import_module(_HOMES[name]), name)

"""The collective channel: messages between two processes, and tokens of a pair that uses it.

The processes of the product do not share a GPU, so the second part needs two of them.
"""

import asyncio
import multiprocessing

import pytest
import torch
from tests.gpu.checkpoints import small_pair
from tests.gpu.environment import Environment, Figure
from tests.gpu.messages import exchange
from tests.gpu.test_tokens import ONE_SHAPE, check_pair, counting_prompts, deployment_of
from tests.processes import start_fork_server

from ssd.errors import LinkError
from ssd.transport.communicator import available_backends


@pytest.mark.check("channel collective", is_slow=True)
def test_messages_and_tokens_travel_over_the_collective_channel(
    environment: Environment, figures: dict[str, Figure]
) -> None:
    name = "nccl" if environment.is_cuda else "gloo"
    if name not in available_backends(environment.target_device):
        hint = ": install nccl4py" if name == "nccl" else ""
        pytest.skip(f"{name} is not available for {environment.target_device}{hint}")
    figures |= exchange(name, _devices(environment))
    if environment.is_cuda and torch.cuda.device_count() < 2:
        return
    flags = (*ONE_SHAPE, "--channel", "collective")
    deployment = deployment_of(*small_pair(environment), environment, flags)
    found: dict[str, Figure] = {}
    asyncio.run(check_pair(deployment, counting_prompts(environment), environment, found))
    figures |= {f"pair_{each}": value for each, value in found.items()}
    channel, transport = str(found["channel"]), found["transport"]
    if "over gRPC" in channel:
        return  # NCCL is measured, and not used where it is slower.
    assert channel.startswith("collective"), f"the link of the pair uses {channel}"
    if environment.is_cuda:
        assert transport != "tcp", "the link of the pair uses tcp between two GPUs"


def test_a_process_that_ends_early_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start_fork_server()
    forks = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: forks)
    with pytest.raises(LinkError, match="no such backend: no result: a process ended with 1"):
        exchange("no such backend", ("cpu", "cpu"))


def _devices(environment: Environment) -> tuple[str, str]:
    """Return the devices of target and draft."""
    if not environment.is_cuda:
        return "cpu", "cpu"
    return "cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"

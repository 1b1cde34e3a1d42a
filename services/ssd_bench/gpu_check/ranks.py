"""Equal tokens of all modes with a target of two ranks, each on its own GPU."""

import asyncio

import torch

from ssd_bench.gpu_check.checkpoints import llama_pair
from ssd_bench.gpu_check.outcome import Environment, Figure, SkipError
from ssd_bench.gpu_check.tokens import ONE_SHAPE, check_pair, counting_prompts, deployment_of

TWO_RANKS = ("--tensor-parallel-size", "2")


def check_two_ranks(environment: Environment) -> dict[str, Figure]:
    """Check random weights in the shapes of Llama-3.1-8B and Llama-3.2-1B.

    The draft shares the second GPU with rank 1: its speed is not that of a draft with its own GPU.

    Raises:
        SkipError: there is only one GPU.
        WrongResultError: tokens differ.
        SSDError: a process cannot start, or a request failed.
    """
    if environment.is_cuda and torch.cuda.device_count() < 2:
        raise SkipError("two ranks need two GPUs, and this machine has one")
    pair = llama_pair(environment)
    target, draft = str(pair.target), str(pair.draft)
    deployment = deployment_of(target, draft, environment, (*ONE_SHAPE, *TWO_RANKS))
    figures = asyncio.run(check_pair(deployment, counting_prompts(environment), environment))
    return figures | {"shares_gpu": environment.is_cuda}

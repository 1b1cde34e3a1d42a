"""Generates one text in modes AR, SD and SSD, with processes that it starts, and compares.

.venv/bin/python examples/compare_modes.py --target 'demo://target?widen=2'

``ssd bench`` repeats such runs, and prints medians and quartiles.
"""

import argparse
import asyncio

from ssd.errors import SSDError
from ssd.rpc.client import TargetClient
from ssd.rpc.codec import GenerateCall
from ssd.runtime.launch import Deployment, deployed
from ssd.types import Mode, SamplingParams, SpeculationStatistics, TokenId

MODES = {"AR": Mode.AUTOREGRESSIVE, "SD": Mode.SYNCHRONOUS, "SSD": Mode.SPECULATIVE}


async def generate(
    client: TargetClient, call: GenerateCall
) -> tuple[list[TokenId], SpeculationStatistics]:
    """Return the tokens and the statistics of a request."""
    token_ids: list[TokenId] = []
    statistics = SpeculationStatistics(mode=call.mode)
    async for chunk in client.generate(call):
        token_ids += chunk.token_ids
        statistics = chunk.statistics or statistics
    return token_ids, statistics


async def compare(options: argparse.Namespace) -> None:
    """Start a target and a draft, and run the three modes, one after the other."""
    deployment = Deployment(target=options.target, draft=options.draft, is_synchronous=True)
    sampling = SamplingParams(
        temperature=options.temperature, ignore_eos=True, seed=7, max_tokens=options.max_tokens
    )
    texts: list[list[TokenId]] = []
    async with deployed(deployment) as running, TargetClient(running.target.grpc_address) as client:
        for name, mode in MODES.items():
            call = GenerateCall(prompt=options.prompt, sampling=sampling, mode=mode)
            await generate(client, call)  # the first request of a mode is slower
            token_ids, found = await generate(client, call)
            speed = (len(token_ids) - 1) / found.decode_seconds
            print(
                f"{name:4} {speed:7.1f} tokens/s  {len(token_ids) / found.rounds:.2f} tokens per "
                f"round  {found.hits} hits, {found.misses} misses, {found.late} late"
            )
            texts.append(token_ids)
    if any(text != texts[0] for text in texts):
        raise SystemExit("the texts differ")
    print(f"identical: all {len(texts[0])} tokens")


def main() -> None:
    """Read the flags; the exit code is 1 if a text differs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", default="demo://target")
    parser.add_argument("--draft", default="demo://draft")
    parser.add_argument("--prompt", default="def fib(n):")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    if options.max_tokens < 2:
        parser.error("--max-tokens must be 2 or more: the speed is that after the first token")
    try:
        asyncio.run(compare(options))
    except SSDError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()

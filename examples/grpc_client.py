"""Continues a prompt over gRPC and prints the statistics of the request.

.venv/bin/python examples/grpc_client.py "def fib(n):" --address 127.0.0.1:50051
"""

import argparse
import asyncio

from ssd.errors import IncompleteTextError, SSDError
from ssd.rpc.client import TargetClient
from ssd.types import SamplingParams


async def generate(address: str, prompt: str, max_tokens: int) -> None:
    """Print the text while it is generated."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    async with TargetClient(address) as client:
        async for chunk in client.generate(prompt, sampling):
            print(chunk.text, end="", flush=True)
            if chunk.statistics is not None:  # the last chunk
                found = chunk.statistics
                print(f"\n{found.rounds} rounds, {found.accepted_tokens} accepted tokens")


def main() -> None:
    """Read the flags and print errors on one line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt", nargs="?", default="def fib(n):")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    try:
        asyncio.run(generate(options.address, options.prompt, options.max_tokens))
    except IncompleteTextError as error:  # the connection was lost after the first token
        raise SystemExit(f"\n{error}") from None
    except SSDError as error:  # no target is ready, the request is invalid, ...
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()

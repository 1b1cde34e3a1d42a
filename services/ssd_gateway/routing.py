"""Which target receives a request. Pure."""

import hashlib
from collections.abc import Mapping

AFFINITY_CHARACTERS = 512
"""Prompts with the same first characters go to the same target, whose prefix cache has them.
Shorter prompts have little to share."""
AFFINITY_SLACK = 4
"""Number of requests by which that target may be ahead of the least busy one."""


def prefix_key(texts: list[str]) -> str | None:
    """Return the key of a prompt, given as its parts; None if it is too short to share."""
    prefix, room = [], AFFINITY_CHARACTERS
    for text in texts:
        prefix.append(text[:room])
        room -= len(prefix[-1])
        if not room:
            return "\0".join(prefix)
    return None


def choose_target(outstanding: Mapping[str, int], key: str | None) -> str:
    """Return the address of a target.

    The prefix selects one target (rendezvous hashing: another target that joins or leaves moves
    few prefixes). The least busy target is used if that one is too busy, or without a prefix.

    Args:
        outstanding: requests in progress of each target that can be used; at least one.
        key: of the prompt; None for no affinity.
    """
    least = min(outstanding.values())
    if key is not None:
        preferred = max(outstanding, key=lambda address: _weight(key, address))
        if outstanding[preferred] <= least + AFFINITY_SLACK:
            return preferred
    return min(outstanding, key=lambda address: (outstanding[address], address))


def _weight(key: str, address: str) -> bytes:
    return hashlib.blake2b(
        f"{address}\0{key}".encode(errors="surrogatepass"), digest_size=8
    ).digest()

"""Free and allocated KV blocks, and the beginnings of texts that are stored in them, no tensors.

Sequences whose texts begin alike share blocks. The *key* of a full block identifies its tokens and
all tokens before it. A block that no sequence owns keeps its entries while its memory is not
needed: it is *cached*, and ``find`` returns it to the next sequence that begins with these tokens.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256

Key = bytes
_PART = 4096
"""Tokens that are converted at once. Meanwhile no other thread runs: 0.15 ms."""


def chain_keys(tokens: Sequence[int], block_size: int, salt: bytes) -> list[Key]:
    """Return the keys of the full blocks of a text.

    A key is a hash of the block's tokens and of the key before it. The salt is secret, so that no
    client can construct two texts with the same key.
    """
    size = block_size * 8
    parts = (tokens[first : first + _PART] for first in range(0, len(tokens), _PART))
    text = b"".join(array("q", part).tobytes() for part in parts)
    keys = [salt]
    for first in range(0, len(text) - size + 1, size):
        keys.append(sha256(keys[-1] + text[first : first + size]).digest())
    return keys[1:]


class BlockPool:
    """Allocates blocks 1..num_blocks-1. Padding is written to block 0, which is never allocated.

    Owned by one thread.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._num_owners: dict[int, int] = {}
        self._cached: dict[int, None] = {}
        """Blocks with a key that no sequence owns, least recently used first."""
        self._keys: dict[int, Key] = {}
        self._blocks: dict[Key, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, the cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_empty(self) -> int:
        """Number of blocks that can be allocated and contain nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of blocks that can be allocated and still contain the beginning of a text."""
        return len(self._cached)

    @property
    def num_taken(self) -> int:
        """Number of blocks with at least one owner."""
        return len(self._num_owners)

    def can_allocate(self, count: int) -> bool:
        """Return whether ``count`` blocks are free."""
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks; ``can_allocate`` must be true.

        Cached blocks are taken last, the least recently used one first.
        """
        assert self.can_allocate(count), f"{count} blocks requested, {self.num_free} free"
        while len(self._free) < count:
            block = next(iter(self._cached))
            del self._cached[block]
            del self._blocks[self._keys.pop(block)]
            self._free.append(block)
        blocks = [self._free.pop() for _ in range(count)]
        self._num_owners.update(dict.fromkeys(blocks, 1))
        return blocks

    def find(self, keys: Iterable[Key]) -> list[int]:
        """Return the blocks of the first keys, up to the first one that is not stored."""
        blocks = []
        for key in keys:
            if (block := self._blocks.get(key)) is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks that ``find`` has returned."""
        for block in blocks:
            self._cached.pop(block, None)
            self._num_owners[block] = self._num_owners.get(block, 0) + 1

    def keep(self, block: int, key: Key) -> None:
        """Note that all entries of an allocated block are stored; it is cached after its use.

        A key that is stored in another block stays there.
        """
        assert block in self._num_owners, block
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one owner of each block; each must have one.

        The last block is the first one whose memory is used again: without it, the blocks before it
        can still be shared.
        """
        for block in reversed(blocks):
            self._num_owners[block] -= 1
            if self._num_owners[block]:
                continue
            del self._num_owners[block]
            if block in self._keys:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check(self) -> None:
        """Assert that every block except 0 is either free, cached or owned."""
        blocks = [*self._free, *self._cached, *self._num_owners]
        assert sorted(blocks) == list(range(1, self._num_blocks))
        assert self._keys.keys() >= self._cached.keys()
        assert {block: key for key, block in self._blocks.items()} == self._keys
        assert not self._keys.keys() & set(self._free)

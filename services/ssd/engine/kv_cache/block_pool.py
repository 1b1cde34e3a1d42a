"""Free and allocated KV blocks, without tensors."""


class BlockPool:
    """Allocates blocks 1..num_blocks-1. Padding is written to block 0, which is never allocated.

    Owned by one thread.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Number of allocated blocks."""
        return len(self._taken)

    def can_allocate(self, count: int) -> bool:
        """Return whether ``count`` blocks are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks; ``can_allocate`` must be true."""
        assert self.can_allocate(count), f"{count} blocks requested, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Free blocks; each must be allocated."""
        for block in blocks:
            self._taken.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Assert that every block except 0 is either free or allocated."""
        assert not self._taken & set(self._free)
        assert self._taken | set(self._free) == set(range(1, self._num_blocks))
        assert len(self._free) + len(self._taken) == self._num_blocks - 1

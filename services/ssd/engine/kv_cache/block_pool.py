"""Which KV blocks are free. Pure bookkeeping, no tensors."""


class BlockPool:
    """Hands out blocks 1..num_blocks-1; block 0 takes what padding writes and is never handed out.

    Owned by one thread.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, num_blocks
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Blocks handed out."""
        return len(self._taken)

    def can_allocate(self, count: int) -> bool:
        """Tell whether ``count`` blocks are free."""
        return count <= len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks; ask ``can_allocate`` first."""
        assert self.can_allocate(count), f"{count} blocks asked, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        self._taken.update(blocks)
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Take blocks back; each must have been handed out."""
        for block in blocks:
            self._taken.remove(block)
            self._free.append(block)

    def check(self) -> None:
        """Assert that every block but 0 is either free or taken, and none is both."""
        assert not self._taken & set(self._free)
        assert self._taken | set(self._free) == set(range(1, self._num_blocks))
        assert len(self._free) + len(self._taken) == self._num_blocks - 1

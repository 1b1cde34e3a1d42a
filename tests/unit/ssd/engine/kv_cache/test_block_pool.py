import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.engine.kv_cache.block_pool import BlockPool, chain_keys


@settings(deadline=None)
@given(
    num_blocks=st.integers(2, 20),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=40),
)
def test_no_block_is_owned_twice_and_none_leaks(
    num_blocks: int, steps: list[tuple[bool, int]]
) -> None:
    pool = BlockPool(num_blocks)
    owners: list[list[int]] = []
    for is_allocation, number in steps:
        if is_allocation and pool.can_allocate(number):
            owners.append(pool.allocate(number))
            assert len(owners[-1]) == number
        elif not is_allocation and owners:
            pool.free(owners.pop(number % len(owners)))
        owned = [block for blocks in owners for block in blocks]
        assert len(owned) == len(set(owned)) == pool.num_taken
        assert pool.num_free == num_blocks - 1 - len(owned)
        assert 0 not in owned
        pool.check()
    for blocks in owners:
        pool.free(blocks)
    pool.check()
    assert pool.num_free == num_blocks - 1


def test_more_blocks_than_are_free_cannot_be_allocated() -> None:
    pool = BlockPool(4)
    assert pool.can_allocate(3)
    assert not pool.can_allocate(4)
    with pytest.raises(AssertionError, match="4 blocks requested, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_free_block_cannot_be_freed() -> None:
    pool = BlockPool(4)
    with pytest.raises(KeyError):
        pool.free([1])


def test_a_key_depends_on_all_tokens_before_it_and_on_the_salt() -> None:
    keys = chain_keys([1, 2, 3, 4, 5, 6, 7], 2, b"salt")
    assert len(set(keys)) == 3
    assert chain_keys([1, 2, 3, 4], 2, b"salt") == keys[:2]
    assert chain_keys([9, 2, 3, 4], 2, b"salt")[1] != keys[1]
    assert chain_keys([1, 2], 2, b"other") != keys[:1]


def test_a_freed_block_keeps_its_entries_until_its_memory_is_needed() -> None:
    pool = BlockPool(4)
    keys = chain_keys(range(6), 2, b"")
    blocks = pool.allocate(2)
    for block, key in zip(blocks, keys, strict=False):
        pool.keep(block, key)
    pool.free(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_taken) == (3, 2, 0)
    assert pool.find(keys) == blocks
    pool.allocate(2)
    assert pool.find(keys) == blocks[:1], "the last block of a text is used again first"
    pool.check()


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    (key,) = chain_keys([1, 2], 2, b"")
    pool.keep(block, key)
    pool.share([block])
    pool.free([block])
    assert pool.num_taken == 1
    pool.free([block])
    assert (pool.num_taken, pool.num_cached) == (0, 1)
    pool.check()

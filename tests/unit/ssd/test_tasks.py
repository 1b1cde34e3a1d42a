"""Tasks beside a block end with it; merged streams arrive whole, and end together."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from ssd.tasks import beside, merged

NOTHING: tuple[int, ...] = ()


async def test_a_task_ends_with_the_block_and_is_waited_for() -> None:
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("work")

    async def block() -> None:
        async with beside(work()):
            await asyncio.sleep(0)
            raise ValueError("block")

    with pytest.raises(ValueError, match="block"):
        await block()
    assert ends == ["work"]


async def test_the_block_reads_the_error_of_a_task() -> None:
    async def work() -> None:
        raise ValueError("work")

    async with beside(work()) as (task,):
        await asyncio.wait({task})
        with pytest.raises(ValueError, match="work"):
            task.result()


async def counts(n: int, closed: list[int]) -> AsyncGenerator[int, None]:
    try:
        for each in range(n):
            yield each
    finally:
        closed.append(n)


async def test_every_item_arrives_in_the_order_of_its_stream() -> None:
    closed: list[int] = []
    found = [item async for item in merged([counts(n, closed) for n in (3, 0, 40)])]
    assert sorted(found) == [(0, each) for each in range(3)] + [(2, each) for each in range(40)]
    assert [each for index, each in found if index == 2] == list(range(40))
    assert sorted(closed) == [0, 3, 40]


async def test_an_error_ends_all_streams() -> None:
    closed: list[int] = []

    async def fails() -> AsyncGenerator[int, None]:
        for each in NOTHING:
            yield each
        raise ValueError("broken")

    async def endless() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            closed.append(1)

    with pytest.raises(ValueError, match="broken"):
        async for _ in merged([endless(), fails()]):
            pass
    assert closed == [1]


async def test_a_reader_that_leaves_closes_all_streams() -> None:
    closed: list[int] = []
    stream = merged([counts(100, closed), counts(200, closed)])
    await anext(stream)
    await stream.aclose()
    assert sorted(closed) == [100, 200]


async def test_one_item_of_each_stream_is_read_ahead() -> None:
    asked: list[int] = []

    async def endless(index: int) -> AsyncGenerator[int, None]:
        while True:
            asked.append(index)
            yield index

    stream = merged([endless(0), endless(1)])
    index, _ = await anext(stream)
    for _ in range(9):
        await asyncio.sleep(0)
    assert sorted(asked) == sorted([0, 1, index])
    await stream.aclose()


async def test_one_stream_is_read_as_it_is_and_closed() -> None:
    closed: list[int] = []
    assert [item async for item in merged([counts(3, closed)])] == [(0, 0), (0, 1), (0, 2)]
    stream = merged([counts(9, closed)])
    await anext(stream)
    await stream.aclose()
    assert closed == [3, 9]


async def test_a_stream_that_fails_at_its_end_leaves_no_other_open() -> None:
    closed: list[int] = []

    async def fails_late() -> AsyncGenerator[int, None]:
        try:
            yield 1
        finally:
            raise ValueError("at the end")

    stream = merged([counts(3, closed), fails_late(), counts(4, closed)])
    await anext(stream)
    with pytest.raises(ValueError, match="at the end"):
        await stream.aclose()
    assert sorted(closed) == [3, 4]


async def test_an_item_that_arrived_with_an_error_comes_before_it() -> None:
    async def fails() -> AsyncGenerator[int, None]:
        for each in NOTHING:
            yield each
        raise ValueError("broken")

    stream = merged([fails(), counts(1, [])])
    assert await anext(stream) == (1, 0)
    with pytest.raises(ValueError, match="broken"):
        await anext(stream)


async def test_an_error_while_the_first_items_are_held_comes_before_them() -> None:
    closed: list[int] = []
    has_item = asyncio.Event()

    async def begins() -> AsyncGenerator[int, None]:
        has_item.set()
        yield 1
        await asyncio.Event().wait()

    async def fails() -> AsyncGenerator[int, None]:
        await has_item.wait()
        for each in NOTHING:
            yield each
        raise ValueError("broken")

    stream = merged([counts(2, closed), begins(), fails()], hold_seconds=60.0)
    with pytest.raises(ValueError, match="broken"):
        await anext(stream)
    assert closed == [2]


async def test_a_stream_without_an_item_holds_the_others_for_a_limited_time() -> None:
    async def never() -> AsyncGenerator[int, None]:
        await asyncio.Event().wait()
        yield 0

    for hold_seconds in (0.0, 0.01):
        stream = merged([counts(3, []), never()], hold_seconds=hold_seconds)
        assert [await anext(stream) for _ in range(3)] == [(0, 0), (0, 1), (0, 2)]
        await stream.aclose()
    stream = merged([counts(2, []), counts(0, [])], hold_seconds=60.0)
    assert [item async for item in stream] == [(0, 0), (0, 1)]

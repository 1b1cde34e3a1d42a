"""A doorbell rings on a thread of its own; links have their CPUs and survive their bugs."""

import os
import threading
from queue import SimpleQueue

import pytest

from ssd.errors import LinkError
from ssd.observability.metrics import PROPOSER_CRASHES_TOTAL
from ssd.pool import link_thread
from ssd.pool.link_thread import LinkThread, doorbell

SECONDS = 30.0


def test_each_call_rings_on_one_other_thread() -> None:
    rings: SimpleQueue[int] = SimpleQueue()
    with doorbell(lambda: rings.put(threading.get_ident())) as ring:
        ring()
        ring()
        found = {rings.get(timeout=SECONDS), rings.get(timeout=SECONDS)}
    assert len(found) == 1
    assert threading.get_ident() not in found


def test_a_link_that_is_closed_does_not_end_the_thread() -> None:
    rings: SimpleQueue[int] = SimpleQueue()

    def fail() -> None:
        rings.put(threading.get_ident())
        raise LinkError("the link to d1 has no event loop: it is closed")

    with doorbell(fail) as ring:
        ring()
        first = rings.get(timeout=SECONDS)
        ring()
        assert rings.get(timeout=SECONDS) == first


def test_the_thread_ends_with_its_context() -> None:
    threads: SimpleQueue[threading.Thread] = SimpleQueue()
    with doorbell(lambda: threads.put(threading.current_thread())) as ring:
        ring()
        thread = threads.get(timeout=SECONDS)
    thread.join(SECONDS)
    assert not thread.is_alive()
    ring()
    assert threads.empty()


def test_links_that_a_bug_has_ended_are_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_thread, "RESTART_SECONDS", 0.0)
    before = PROPOSER_CRASHES_TOTAL._value.get()
    starts: SimpleQueue[int] = SimpleQueue()
    errors = [ValueError("a bug"), KeyError("another"), None]

    async def serve() -> None:
        starts.put(0)
        error = errors.pop(0)
        if error is not None:
            raise error

    links = LinkThread(serve, ())
    links.start()
    for _ in range(3):
        starts.get(timeout=SECONDS)
    links.stop()
    assert starts.empty()
    assert PROPOSER_CRASHES_TOTAL._value.get() == before + 2


def test_links_run_on_the_given_cpus_and_change_no_other_thread() -> None:
    all_cpus = os.sched_getaffinity(0)
    # A thread has those of the thread that starts it.
    pinned, given = {min(all_cpus)}, {max(all_cpus)}
    found: SimpleQueue[set[int]] = SimpleQueue()

    async def serve() -> None:
        found.put(os.sched_getaffinity(0))

    links = LinkThread(serve, given)
    os.sched_setaffinity(0, pinned)
    try:
        links.start()
        assert found.get(timeout=SECONDS) == given
        assert os.sched_getaffinity(0) == pinned
    finally:
        os.sched_setaffinity(0, all_cpus)
        links.stop()

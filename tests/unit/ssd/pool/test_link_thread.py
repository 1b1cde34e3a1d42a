"""A doorbell rings on a thread of its own."""

import threading
from queue import SimpleQueue

from ssd.errors import LinkError
from ssd.pool.link_thread import doorbell

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

"""Settings and order of all tests."""

import gc
import os
import signal
import time
from collections.abc import Generator

import pytest
from hypothesis import settings
from tests.time_limit import ENDS_AT

# Before a test imports OpenVINO, whose import otherwise reports to the internet.
import ssd.engine.openvino_engine  # noqa: F401

# By default, an example that takes 200 ms fails. On a busy machine, the code is not the cause.
settings.register_profile("untimed", deadline=None, max_examples=50)
# ``--hypothesis-profile long``: hours of examples, which ``make test`` has no time for.
settings.register_profile("long", deadline=None, max_examples=10_000)
settings.load_profile("untimed")

UNIT_SECONDS = 10
"""Time-out of a unit test without its fixtures, unless the option ``--timeout`` is given."""
LONGEST_FIRST = ("tests/exactness/", "tests/integration/", "tests/unit/ssd_operator/")
"""If a long file began last, one worker would be busy while the others have no work left."""


# A background job of a shell ignores Ctrl-C, and so would the processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without the garbage collector.

    It would examine all imported modules again and again: a third of the time of each worker before
    its first test. Afterwards, it never examines them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Refuse parameters in a set: its order, and so the tests, can differ between two workers.

    Raises:
        pytest.UsageError: A test has such parameters.
    """
    for mark in metafunc.definition.iter_markers("parametrize"):
        if any(
            isinstance(values, set | frozenset) for values in (*mark.args, *mark.kwargs.values())
        ):
            raise pytest.UsageError(f"{metafunc.definition.nodeid}: sort the set of parameters")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by folder; the order within a folder stays. A unit test has a short time-out."""
    for item in items:
        is_timed = any(map(item.get_closest_marker, ("timeout", "slow")))
        is_unit = item.nodeid.startswith("tests/unit/") and not is_timed
        if is_unit and item.config.getoption("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT_SECONDS, func_only=True))
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST_FIRST))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.monotonic() > ENDS_AT:
        pytest.skip("the time of TEST_SECONDS is over")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Workers of ``-n auto``: one for each CPU that this process may use."""
    return len(os.sched_getaffinity(0))

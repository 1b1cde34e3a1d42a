"""What holds for all tests."""

import os

import pytest
from hypothesis import settings

# By default an example that takes 200 ms fails: on a busy machine that measures the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Workers of ``-n auto``: one for each CPU that this process may use."""
    return len(os.sched_getaffinity(0))

"""Devices that a machine has, and has not."""

import pytest

from ssd.engine.runner import require_device
from ssd.errors import SettingsError


def test_every_machine_has_a_cpu() -> None:
    require_device("cpu")


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_named_and_replaced_by_no_other(device: str) -> None:
    with pytest.raises(SettingsError, match=device):
        require_device(device)

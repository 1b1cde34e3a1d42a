"""Devices that exist and devices that do not."""

import pytest

from ssd.engine.runner import require_device
from ssd.errors import SettingsError


def test_every_machine_has_a_cpu() -> None:
    require_device("cpu")


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_missing_device_is_named_and_not_replaced(device: str) -> None:
    with pytest.raises(SettingsError, match=device):
        require_device(device)

"""Settings of the gateway."""

import pytest

from ssd.errors import SettingsError
from ssd_gateway.settings import GatewaySettings


@pytest.mark.parametrize("targets", [(), ("host",), ("host:0",), (":50051",)])
def test_targets_are_addresses(targets: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="targets"):
        GatewaySettings(targets=targets)


def test_half_of_the_bytes_of_all_bodies_is_enough_for_one() -> None:
    GatewaySettings(max_body_bytes=2048, max_total_body_bytes=4096)
    with pytest.raises(SettingsError, match="max_total_body_bytes: is 4095"):
        GatewaySettings(max_body_bytes=2048, max_total_body_bytes=4095)


def test_a_name_that_must_be_resolved_is_an_address() -> None:
    assert GatewaySettings(targets=("dns:///demo-targets.default.svc:50051",)).targets

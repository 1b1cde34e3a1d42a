"""Settings of the gateway."""

import pytest

from ssd.errors import SettingsError
from ssd_gateway.settings import GatewaySettings


@pytest.mark.parametrize("targets", [(), ("host",), ("host:0",), (":50051",)])
def test_targets_are_addresses(targets: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="targets"):
        GatewaySettings(targets=targets)


def test_the_bodies_of_all_requests_may_be_as_large_as_that_of_one() -> None:
    with pytest.raises(SettingsError, match="max_total_body_bytes"):
        GatewaySettings(max_body_bytes=2048, max_total_body_bytes=2047)


def test_a_name_that_must_be_resolved_is_an_address() -> None:
    assert GatewaySettings(targets=("dns:///demo-targets.default.svc:50051",)).targets

"""Settings of the gateway."""

import pytest

from ssd.errors import SettingsError
from ssd_gateway.settings import GatewaySettings


@pytest.mark.parametrize("targets", [(), ("host",), ("host:0",), (":50051",)])
def test_targets_are_addresses(targets: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="targets"):
        GatewaySettings(targets=targets)


def test_a_name_that_must_be_resolved_is_an_address() -> None:
    assert GatewaySettings(targets=("dns:///demo-targets.default.svc:50051",)).targets

"""What ``ssd up`` prints, and its pause before it restarts a failed draft."""

import pytest

from ssd_cli.up import STEADY_SECONDS, credential_flags, restart_delay


@pytest.mark.parametrize(
    ("lives", "delays"),
    [
        ([1.0] * 8, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]),
        ([1.0, 1.0, 1.0, STEADY_SECONDS, 1.0], [1.0, 2.0, 4.0, 1.0, 2.0]),
        ([1.0] * 8 + [STEADY_SECONDS], [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 1.0]),
        ([1.0, 1.0, 1.0, STEADY_SECONDS - 0.1], [1.0, 2.0, 4.0, 8.0]),
    ],
)
def test_the_pause_doubles_after_each_early_failure_up_to_a_minute_and_is_short_after_a_long_run(
    lives: list[float], delays: list[float]
) -> None:
    found = [0.0]
    for lived in lives:
        found.append(restart_delay(found[-1], lived))
    assert found[1:] == delays


SECURED = {"SSD_TARGET_TLS_CERTIFICATE": "tls.crt", "SSD_TARGET_TOKEN_FILE": "my tokens"}
MUTUAL = SECURED | {"SSD_TARGET_TLS_CLIENT_CA": "ca.crt"}
OF_GATEWAY = {
    "SSD_GATEWAY_TARGET_CA": "ca.crt",
    "SSD_GATEWAY_TARGET_CERTIFICATE": "own.crt",
    "SSD_GATEWAY_TARGET_KEY": "own.key",
}


@pytest.mark.parametrize(
    ("environ", "flags"),
    [
        ({}, ""),
        (OF_GATEWAY, ""),
        (SECURED, "--tls-ca TLS_CA.PEM --token-file 'my tokens' "),
        (SECURED | OF_GATEWAY, "--tls-ca ca.crt --token-file 'my tokens' "),
        (SECURED | {"SSD_TLS_CA": "ca.crt", "SSD_TOKEN_FILE": "mine"}, ""),
        (
            MUTUAL | OF_GATEWAY,
            "--tls-ca ca.crt --tls-certificate own.crt --tls-key own.key --token-file 'my tokens' ",
        ),
    ],
)
def test_the_example_has_the_flags_that_a_secured_target_needs(
    environ: dict[str, str], flags: str
) -> None:
    assert credential_flags(environ) == flags

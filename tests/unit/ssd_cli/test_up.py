"""What ``ssd up`` prints, and its pause before it restarts a failed draft."""

import pytest

from ssd_cli.up import (
    LONGEST_RESTART_SECONDS,
    RESTART_SECONDS,
    STEADY_SECONDS,
    credential_flags,
    restart_delay,
)


def delays(lives: list[float]) -> list[float]:
    found = [0.0]
    for lived in lives:
        found.append(restart_delay(found[-1], lived))
    return found[1:]


def test_the_pause_doubles_after_each_early_failure_up_to_a_minute() -> None:
    assert delays([1.0] * 8) == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]


def test_the_pause_is_short_after_a_long_run() -> None:
    assert delays([1.0, 1.0, 1.0, STEADY_SECONDS, 1.0]) == [1.0, 2.0, 4.0, 1.0, 2.0]
    assert restart_delay(LONGEST_RESTART_SECONDS, STEADY_SECONDS) == RESTART_SECONDS


def test_the_pause_doubles_just_below_the_bound() -> None:
    assert restart_delay(4.0, STEADY_SECONDS - 0.1) == 8.0


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

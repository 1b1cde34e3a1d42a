"""What ``ssd up`` prints, and its pause before it restarts a failed draft."""

from pathlib import Path
from typing import NoReturn

import pytest

from ssd.errors import SetupError
from ssd.observability.log import Event
from ssd.runtime.launch import Deployment, EventListener
from ssd_cli import up as up_module
from ssd_cli.up import (
    STEADY_SECONDS,
    check_overlaps,
    credential_flags,
    restart_delay,
    state_folder,
    up,
)


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


@pytest.mark.parametrize(
    "ports",
    [
        {"port": 7000, "http_port": 7002, "gateway_port": 7004},
        {"port": 7000, "http_port": 6998, "gateway_port": 6997},
        {"port": 0, "http_port": 0, "gateway_port": 0},
        {"port": 7000, "http_port": 7002, "gateway_port": None},
    ],
)
def test_ports_that_do_not_overlap_are_accepted(ports: dict[str, int | None]) -> None:
    check_overlaps(Deployment(num_drafts=1, **ports))  # type: ignore[arg-type]


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


def test_a_pair_at_a_port_has_a_folder_for_the_fan_out_of_its_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    pair = ("target", "demo://draft", 50051)
    folder = Path(state_folder(*pair))
    assert folder.parent == tmp_path / "ssd" / "fan_out"
    assert state_folder(str(tmp_path / "target"), *pair[1:]) == str(folder)
    others = [("demo://target", *pair[1:]), (pair[0], "draft", pair[2]), (*pair[:2], 50061)]
    assert len({str(folder), *(state_folder(*other) for other in others)}) == 4
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert state_folder(*pair) != str(folder)


@pytest.mark.parametrize("of_user", ["", "/mine"])
def test_a_state_folder_of_the_environment_replaces_that_of_the_cache(
    of_user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_DRAFT_STATE_FOLDER", of_user)
    assert state_folder("demo://target", "demo://draft", 0) == of_user


def test_a_user_without_a_home_folder_has_no_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", without_home)
    assert state_folder("demo://target", "demo://draft", 0) == ""


@pytest.mark.parametrize("is_json", [False, True])
async def test_a_problem_of_a_process_is_printed_while_it_starts(
    *, is_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deployed(_deployment: Deployment, on_event: EventListener) -> NoReturn:
        on_event("target", Event("link", {"level": "info"}))
        on_event("gateway", Event("target_not_ready", {"level": "info", "reason": "no token"}))
        raise SetupError("gateway was not ready")

    monkeypatch.setattr(up_module, "deployed", deployed)
    with pytest.raises(SetupError, match="gateway was not ready"):
        await up(Deployment(num_drafts=0), is_json=is_json)
    output = capsys.readouterr()
    assert output.out == ""
    assert "gateway: target_not_ready reason=no token\n" in output.err
    assert "link" not in output.err

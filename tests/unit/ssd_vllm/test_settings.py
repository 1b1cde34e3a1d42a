"""Settings of the plugin, and the versions that it accepts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssd.errors import SettingsError, SetupError
from ssd_vllm.settings import read
from ssd_vllm.versions import check_parameters, check_version


def test_settings_are_read_from_the_additional_config() -> None:
    found = read({"ssd": {"drafts": ["a:1", "b:2"], "branches": 12}, "other": 1})
    assert (found.drafts, found.branches, found.sampling) == (("a:1", "b:2"), 12, "coupled")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "give the drafts"),
        ({"ssd": "a:1"}, "must be a mapping"),
        ({"ssd": {"drafts": ["a"]}}, "is not host:port"),
        ({"ssd": {"draft": ["a:1"]}}, "did you mean drafts"),
        ({"ssd": {"drafts": ["a:1"], "sampling": "greedy"}}, "sampling"),
        ({"ssd": {"drafts": ["a:1"], "branches": 0}}, "outside 1..128"),
        ({"ssd": {"admin_port": 1, "admin_host": "0.0.0.0"}}, "set admin_token_file"),
        ({"ssd": {"tls_certificate": "c"}}, "give both, or neither"),
        ({"ssd": {"tls_client_ca": "c"}}, "tls_client_ca needs tls_certificate"),
        ({"ssd": {"admin_names": ["o"]}}, "need tls_client_ca"),
        (
            {"ssd": {"admin_port": 1, "admin_host": "0.0.0.0", "admin_token_file": "t"}},
            "send their tokens in plain text",
        ),
    ],
)
def test_a_wrong_setting_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read(config).check_drafts()


@pytest.mark.parametrize("name", ["link_ca", "admin_token_file", "token_file"])
def test_a_file_that_is_missing_is_named_before_vllm_serves(tmp_path: Path, name: str) -> None:
    settings = read({"ssd": {"drafts": ["127.0.0.1:1"], name: str(tmp_path / "absent")}})
    with pytest.raises(SettingsError, match="absent: No such file"):
        settings.check_files()


def test_the_network_may_protect_the_port() -> None:
    exposed = {"admin_port": 1, "admin_host": "0.0.0.0", "allow_insecure": True}
    assert read({"ssd": exposed}).security().access.role.is_open


def test_other_versions_of_vllm_are_refused() -> None:
    check_version("0.32.1")
    with pytest.raises(SetupError, match=r"supports vLLM 0\.32, found 0\.31\.0"):
        check_version("0.31.0")


def test_a_function_with_other_parameters_is_refused() -> None:
    function: Callable[..., Any] = lambda logits, more: (logits, more)  # noqa: E731
    check_parameters({function: ("logits",)})
    with pytest.raises(SetupError, match=r"has the parameters logits, more; expected more"):
        check_parameters({function: ("more",)})

"""Settings of the target."""

from dataclasses import fields

import pytest

from ssd.errors import SettingsError
from ssd.settings import field_help, load, parse_cpus
from ssd_target.settings import TargetSettings


def settings(*argv: str) -> TargetSettings:
    return load(TargetSettings, argv, prefix="SSD_TARGET", environ={}).settings


def test_drafts_are_a_list_of_addresses() -> None:
    assert settings("--drafts", "127.0.0.1:1,localhost:2").drafts == ("127.0.0.1:1", "localhost:2")
    assert settings("--drafts", "").drafts == ()
    assert settings("--drafts", "dns:///demo-draft-0:50052").drafts == (
        "dns:///demo-draft-0:50052",
    )


@pytest.mark.parametrize(
    "address",
    [
        *("drafts", "drafts:", ":50052", "drafts:0", "drafts:65536", "drafts:http", "a:-1"),
        *("dns:///drafts", "dns:///:50052", "dns:///"),
    ],
)
def test_an_invalid_address_is_refused_at_start(address: str) -> None:
    with pytest.raises(SettingsError, match="host:port"):
        settings("--drafts", f"127.0.0.1:1,{address}")


@pytest.mark.parametrize(
    ("model", "name", "served"),
    [
        ("demo://target", "", "target"),
        ("/models/llama/", "", "llama"),
        ("/models/llama", "mine", "mine"),
    ],
)
def test_the_served_name_follows_the_model(model: str, name: str, served: str) -> None:
    assert settings("--model", model, "--model-name", name).served_name == served


def test_a_setting_that_both_bases_have_is_the_same_in_both() -> None:
    first, second = (
        {
            each.name: (each.default, each.metadata, field_help(base)[each.name])
            for each in fields(base)
        }
        for base in TargetSettings.__bases__
    )
    shared = first.keys() & second.keys()
    assert shared == {"tls_certificate", "tls_key", "allow_insecure", "branches"}
    assert [name for name in shared if first[name] != second[name]] == []


def test_cpus_are_numbers_and_ranges() -> None:
    assert parse_cpus("cpus", "0,2-4") == {0, 2, 3, 4}
    assert parse_cpus("cpus", "") == frozenset()
    with pytest.raises(SettingsError, match="io_cpus"):
        settings("--io-cpus", "one")
    with pytest.raises(SettingsError, match="'0,3-1' is not a list of CPUs"):
        parse_cpus("cpus", "0,3-1")

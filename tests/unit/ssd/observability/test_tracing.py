from typing import Any, cast

import pytest

import ssd
from ssd.errors import SettingsError
from ssd.observability.tracing import check_endpoint, exported_spans


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://collector:4317", "http://"])
def test_an_endpoint_has_a_scheme_and_a_place(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="http://host:port"):
        check_endpoint(endpoint)


async def test_the_sdk_is_imported_only_with_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    async with exported_spans("", "ssd-target", "pod") as provider:
        assert not provider.get_tracer("t").start_span("s").is_recording()
    with pytest.raises(SettingsError, match=r"ssd-serving\[otel\]"):
        check_endpoint("http://collector:4317")


async def test_attributes_of_the_environment_replace_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=blue,service.instance.id=mine")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llama")
    async with exported_spans("http://127.0.0.1:1", "ssd-target", "pod") as provider:
        found = cast(Any, provider).resource.attributes
    assert found["service.name"] == "llama"
    assert (found["team"], found["service.instance.id"]) == ("blue", "mine")
    assert found["service.version"] == ssd.__version__

"""What the operator watches."""

import pytest

from ssd.errors import SettingsError
from ssd_operator.settings import OperatorSettings


@pytest.mark.parametrize(
    ("settings", "scope"),
    [
        (OperatorSettings(pod_namespace="here"), ("here",)),
        (OperatorSettings(pod_namespace="here", watch_namespaces=("a", "b")), ("a", "b")),
        (OperatorSettings(pod_namespace="kube-system", watch_namespaces=("a",)), ("a",)),
        (OperatorSettings(pod_namespace="here", watch_all_namespaces=True), ()),
        (OperatorSettings(pod_namespace="kube-system", watch_all_namespaces=True), ()),
    ],
)
def test_the_operators_own_namespace_is_watched_unless_others_are_named(
    settings: OperatorSettings, scope: tuple[str, ...]
) -> None:
    assert settings.scope == scope


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (OperatorSettings(pod_namespace="kube-system"), "nothing is written in kube-system"),
        (OperatorSettings(watch_namespaces=("a", "kube-system")), "kube-system"),
        (OperatorSettings(watch_namespaces=("a",), watch_all_namespaces=True), "choose one"),
    ],
)
def test_an_invalid_scope_is_rejected(settings: OperatorSettings, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        assert settings.scope

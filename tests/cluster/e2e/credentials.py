"""Secrets with certificates and tokens, for a resource and for the operator."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager

from tests.cluster.kube import EVERYWHERE, Kube, Release, install
from tests.pki import Authority

TOKENS = {each: f"token-of-{each}-0123456789" for each in ("clients", "links", "admins")}
SECURITY = {
    "tls": {"mode": "Mutual", "targetSecretName": "target-tls", "draftSecretName": "draft-tls"},
    "tokenSecretName": "tokens",
}
"""Of a resource."""
CHANGE_SECONDS = 180.0
"""In which the kubelet replaces the files of a changed Secret."""


def put_secret(kube: Kube, name: str, files: dict[str, str]) -> None:
    """Create or replace a Secret."""
    data = {key: base64.b64encode(text.encode()).decode() for key, text in files.items()}
    kube.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data})


def tls_secret(authority: Authority, *names: str) -> dict[str, str]:
    """The files of a new certificate."""
    certificate, key = (each.decode() for each in authority.issue(*names))
    return {"tls.crt": certificate, "tls.key": key, "ca.crt": authority.pem.decode()}


def target_names(kube: Kube, name: str) -> tuple[str, ...]:
    """Names in the certificate of a resource's target."""
    return f"{name}.{kube.namespace}.svc", _spiffe(kube.namespace, f"{name}-target")


@contextmanager
def credentials(kube: Kube, release: Release, authority: Authority, name: str) -> Iterator[None]:
    """Inside, there are the Secrets of ``SECURITY`` for a resource, and the operator's own."""
    put_secret(kube, "target-tls", tls_secret(authority, *target_names(kube, name)))
    put_secret(kube, "draft-tls", tls_secret(authority, f"{name}-draft.{kube.namespace}.svc"))
    put_secret(kube, "tokens", TOKENS)
    operator = tls_secret(authority, _spiffe(release.namespace, "ssd-operator"))
    own = Kube(release.namespace)
    put_secret(own, "credentials", operator | {"token": TOKENS["admins"]})
    given = ("--set", "operator.credentialsSecretName=credentials")
    install(release.name, release.namespace, *EVERYWHERE, *given)
    try:
        yield
    finally:
        install(release.name, release.namespace, *EVERYWHERE)
        for each in ("target-tls", "draft-tls", "tokens"):
            kube("delete", "secret", each)
        own("delete", "secret", "credentials")


def _spiffe(namespace: str, account: str) -> str:
    return f"spiffe://ssd/ns/{namespace}/sa/{account}"

"""Metadata of every child: name, owner, labels, hash."""

import hashlib
import json
from dataclasses import dataclass

from ssd_operator.api.spec import API_VERSION, KIND, Object, Resource
from ssd_operator.children.kinds import KINDS
from ssd_operator.children.names import HASH_ANNOTATION, labels_of
from ssd_operator.settings import OperatorSettings

HASH_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildFactory:
    """Makes the children of one resource."""

    resource: Resource
    settings: OperatorSettings

    def make(
        self,
        kind: str,
        name: str,
        body: Object,
        *,
        of: tuple[str | None, int | None] = (None, None),
    ) -> Object:
        """Return a whole object with this body.

        Args:
            kind: of the object, one of ``KINDS``.
            name: of the object.
            body: fields beside ``metadata``.
            of: component and cell, for labels.

        Returns:
            The object; its hash is that of everything else in it.
        """
        labels = labels_of(self.resource, *of)
        labels["app.kubernetes.io/version"] = self.settings.version
        made: Object = {
            "apiVersion": KINDS[kind].api_version,
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": self.resource.namespace,
                "labels": labels,
                "ownerReferences": [owner_reference(self.resource)],
            },
            **body,
        }
        made["metadata"]["annotations"] = {HASH_ANNOTATION: digest(made, HASH_DIGITS)}
        return made


def owner_reference(resource: Resource) -> Object:
    """The garbage collector's link from a child to its resource."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": resource.name,
        "uid": resource.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def digest(value: Object, num_digits: int) -> str:
    """First hexadecimal digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:num_digits]

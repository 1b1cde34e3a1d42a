"""The CustomResourceDefinitions, generated from the models of spec and status.

``python -m ssd_operator.api.schema`` prints them; ``charts/ssd/files/crd.yaml`` is its output.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import yaml
from pydantic import TypeAdapter

from ssd_operator.api.fields import RESOURCE_NAME, rules
from ssd_operator.api.pool import PoolSpec
from ssd_operator.api.spec import GROUP, KIND, PLURAL, POOL_KIND, POOL_PLURAL, VERSION, Object, Spec
from ssd_operator.api.status import POOL_STATUS, STATUS

_SERVICES = "^.*-(targets|gateway|pool|draft(-[0-9]+)?)$"
"""Names of Services of other resources, which clients of this one would reach, and begins of the
names of a pool's children."""
_NAMED = (
    (
        "oldSelf.hasValue() || "
        f"self.metadata.name.size() <= 40 && self.metadata.name.matches('{RESOURCE_NAME}')",
        "metadata.name: children add to it, so it has at most 40 characters of a-z, 0-9 and '-', "
        "begins with a letter and does not end with '-'",
    ),
    (
        f"oldSelf.hasValue() || self.kind == '{POOL_KIND}'"
        f" || !self.metadata.name.matches('{_SERVICES}')",
        "metadata.name: a name that ends in -targets, -gateway, -pool, -draft or -draft-NUMBER "
        "could be the name of another resource's Service; use another name",
    ),
)
"""Rules of names, on create only: a name cannot change, and a stored resource stays usable."""

_NOT_STRUCTURAL = {"title", "$defs", "$ref", "anyOf"}

_DEFINITION = f"""
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata:
  name: PLURAL.{GROUP}
  annotations:
    # Helm reads it from the live object. Without it, an upgrade that does not contain this object
    # deletes it with all resources.
    helm.sh/resource-policy: keep
spec:
  group: {GROUP}
  scope: Namespaced
  names:
    kind: KIND
    listKind: KINDList
    plural: PLURAL
    singular: SINGULAR
    shortNames: [SHORT]
    categories: [inference]
  versions:
  - name: {VERSION}
    served: true
    storage: true
    additionalPrinterColumns: []
    schema:
      openAPIV3Schema:
        description: ABOUT
        type: object
        properties:
          apiVersion: {{description: {GROUP}/{VERSION}., type: string}}
          kind: {{description: KIND., type: string}}
          metadata: {{type: object}}  # the API server owns this schema and rejects additions
        required: [spec]
    subresources:
      status: {{}}
      scale:
        specReplicasPath: REPLICAS
        statusReplicasPath: .status.draft.replicas
        labelSelectorPath: .status.draft.selector
"""
_CONDITION = '.status.conditions[?(@.type=="{}")].{}'
_COLUMNS = (
    ("Ready", _CONDITION.format("Ready", "status"), "Whether a target serves.", 0),
    ("Targets", ".status.target.summary", "Ready over wanted.", 0),
    ("Drafts", ".status.draft.summary", "Active links over wanted.", 0),
    ("Speculation", ".status.speculation.state", "Active, or why it is not.", 0),
    ("Transport", ".status.transport.effective", "How tables are sent.", 0),
    ("Age", ".metadata.creationTimestamp", "Time since creation.", 0),
    ("Model", ".status.model.name", "Id that clients use.", 1),
    ("Reason", _CONDITION.format("Ready", "reason"), "Why it is ready or not.", 1),
    ("Endpoint", ".status.endpoint.*", "Where clients call.", 1),
)
"""Name, path, description, and 1 if it is shown with ``-o wide`` only."""
_POOL_COLUMNS = (
    ("Ready", _CONDITION.format("Ready", "status"), "Whether all wanted drafts are ready.", 0),
    ("Reason", _CONDITION.format("Ready", "reason"), "Why it is ready or not.", 0),
    ("Drafts", ".status.draft.summary", "Ready over wanted.", 0),
    ("Targets", ".status.target.summary", "Targets with a link over ready targets.", 0),
    (
        "Progress",
        _CONDITION.format("Progressing", "reason"),
        "UpToDate, or what a change waits for.",
        0,
    ),
    ("Sessions", ".status.sessions.open", "Open sessions.", 0),
    ("Capacity", ".status.sessions.capacity", "Sessions that the ready drafts accept.", 0),
    ("Age", ".metadata.creationTimestamp", "Time since creation.", 0),
    ("Deployments", ".status.deployments", "SSDDeployments that refer to it.", 1),
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What the definitions of the two kinds differ in."""

    plural: str
    short_name: str
    about: str
    replicas: str
    """Path of the number of drafts."""
    spec: type
    status: Object
    columns: Sequence[tuple[str, str, str, int]]


_KINDS = {
    KIND: _Kind(
        PLURAL,
        "ssd",
        "A target with its drafts and the requirements on their links.",
        ".spec.draft.replicas",
        Spec,
        STATUS,
        _COLUMNS,
    ),
    POOL_KIND: _Kind(
        POOL_PLURAL,
        "ssddp",
        "Drafts that the targets of several SSDDeployments share.",
        ".spec.replicas",
        PoolSpec,
        POOL_STATUS,
        _POOL_COLUMNS,
    ),
}


def crd(kind: str = KIND) -> Object:
    """The definition of a kind, as an API server accepts it."""
    details, text = _KINDS[kind], _DEFINITION
    words = {"PLURAL": details.plural, "KIND": kind, "SINGULAR": kind.lower()}
    words |= {"SHORT": details.short_name, "ABOUT": details.about, "REPLICAS": details.replicas}
    for word, value in words.items():
        text = text.replace(word, value)
    definition: Object = yaml.safe_load(text)
    version = definition["spec"]["versions"][0]
    version["additionalPrinterColumns"] = [
        {
            "name": name,
            "type": "date" if name == "Age" else "string",
            "jsonPath": path,
            "description": shown,
            "priority": priority,
        }
        for name, path, shown, priority in details.columns
    ]
    root = version["schema"]["openAPIV3Schema"]
    schemas = {"spec": structural(details.spec), "status": _structural(details.status, {})}
    root["properties"] |= schemas
    root |= rules(*_NAMED)
    for rule in root["x-kubernetes-validations"]:
        rule["optionalOldSelf"] = True  # else the API server evaluates it on updates only
    return definition


def structural(model: type) -> Object:
    """The structural schema of a model for Kubernetes: without references, nulls and titles.

    Returns:
        What ``openAPIV3Schema`` holds. Every object in it is its own.
    """
    schema = TypeAdapter(model).json_schema()
    return _structural(schema, schema.get("$defs", {}))


def _structural(node: Object, definitions: Object) -> Object:
    node = _resolved(node, definitions)
    words, default = node.pop("description", None), node.pop("default", None)
    schema = {name: value for name, value in node.items() if name not in _NOT_STRUCTURAL}
    kind = schema.get("type")
    if kind == "integer":
        schema.setdefault("format", "int32")
        if numbers := schema.get("enum"):
            schema |= {"minimum": min(numbers), "maximum": max(numbers)}
    elif kind == "array":
        schema.setdefault("x-kubernetes-list-type", "atomic")
        schema["items"] = _structural(schema["items"], definitions)
    elif "enum" in schema:
        schema["maxLength"] = max(map(len, schema["enum"]))
    for name, field in schema.get("properties", {}).items():
        schema["properties"][name] = _structural(field, definitions)
    if "additionalProperties" in schema:
        schema["additionalProperties"] = _structural(schema["additionalProperties"], definitions)
    if isinstance(default, dict):
        # The API server validates it as written, before it fills in the defaults of fields.
        has_rules = "x-kubernetes-validations" in schema
        fields = {name: value for name, value in default.items() if value is not None}
        schema["default"] = fields if has_rules else {}
    elif default is not None and not isinstance(default, list):
        schema["default"] = default
        word = default if isinstance(default, str) else json.dumps(default)
        words = f"{words} Default: {word}."
    return ({"description": " ".join(words.split())} if words else {}) | schema


def _resolved(node: Object, definitions: Object) -> Object:
    """The schema that a reference names, or the one beside null; the node's own fields win."""
    if "anyOf" in node:
        node = {**next(option for option in node["anyOf"] if option.get("type") != "null"), **node}
    if "$ref" in node:
        node = {**definitions[node["$ref"].rpartition("/")[2]], **node}
    copied: Object = json.loads(json.dumps(node))
    return copied


def crd_yaml() -> str:
    """The definitions as the chart's file holds them."""
    head = "# Generated: python -m ssd_operator.api.schema > charts/ssd/files/crd.yaml\n"
    return head + yaml.safe_dump_all(map(crd, _KINDS), sort_keys=False, width=100)


if __name__ == "__main__":
    sys.stdout.write(crd_yaml())

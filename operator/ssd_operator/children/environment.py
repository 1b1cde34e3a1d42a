"""Environment of engine pods: settings that the processes have, and nothing else.

A process refuses a setting it does not know, so a variable whose value is the process's own default
stays out wherever an older, pinned image may not know its name.
"""

from collections.abc import Sequence

from ssd_operator.api import reserved
from ssd_operator.api.spec import Accelerator, Object, Resource, Source, Speculation
from ssd_operator.children.names import DRAFT_PORT, HTTP_PORT, TARGET_PORT, draft_deployment

TERMINATION_LOG = "/dev/termination-log"
PROCESS_DTYPE = "auto"
"""The processes' own default."""


def target_environment(resource: Resource, cell: int, num_threads: int) -> list[Object]:
    """Settings of a cell's target.

    Args:
        resource: whose target.
        cell: of the target.
        num_threads: of one forward pass on a CPU; ignored on a GPU.
    """
    spec, engine = resource.spec, resource.spec.target.engine
    settings: dict[str, object] = {
        "MODEL_NAME": spec.model.name or resource.name,
        "PORT": TARGET_PORT,
        "DRAFTS": f"{draft_deployment(resource, cell)}:{DRAFT_PORT}",
        "MAX_NUM_SEQS": engine.max_num_seqs,
        "MAX_QUEUE": engine.max_queue,
        "DETERMINISTIC": "true" if engine.deterministic else None,
        "DRAIN_SECONDS": spec.target.drain_seconds,
        "MAX_ROUND_TRIP_US": spec.transport.max_round_trip_microseconds or None,
    }
    settings |= _common(resource, spec.target.source, num_threads) | _policy(spec.speculation)
    return [
        *_variables("SSD_TARGET", settings),
        *_identity("SSD_TARGET", cell),
        *_hub(spec.target.source),
    ]


def draft_environment(resource: Resource, cell: int | None, num_threads: int) -> list[Object]:
    """Settings of a draft; ``cell`` is None in a Pool."""
    spec = resource.spec
    settings: dict[str, object] = {
        "PORT": DRAFT_PORT,
        "MAX_SESSIONS": spec.draft.sequences_per_replica,
        "DRAIN_SECONDS": spec.draft.drain_seconds,
    }
    settings |= _common(resource, spec.draft.source, num_threads)
    return [
        *_variables("SSD_DRAFT", settings),
        *_identity("SSD_DRAFT", cell),
        *_hub(spec.draft.source),
    ]


def is_on_hub(source: Source) -> bool:
    """Whether it is fetched before the engine starts."""
    return source.uri.startswith("hf://")


def fetch_environment(source: Source) -> list[Object]:
    """Settings of the container that fetches a model, which alone has the hub's token."""
    settings: dict[str, object] = {"MODEL": _model(source), "TERMINATION_LOG": TERMINATION_LOG}
    found = [*_variables("SSD_FETCH", settings), _hub_folder()]
    if source.token_secret is not None:
        key = {"name": source.token_secret.name, "key": source.token_secret.key}
        # By reference: its value is never read here.
        found.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    return found


def merged(ours: Sequence[Object], users: Sequence[Object]) -> list[Object]:
    """Ours with the user's own: by name the user wins, except for what is reserved."""
    theirs = {each["name"]: each for each in users if each["name"] not in reserved.ENV}
    kept = [theirs.pop(each["name"], each) for each in ours]
    return kept + list(theirs.values())


def volume_claim(source: Source) -> str:
    """Claim of a ``pvc://claim/path`` source; empty for others."""
    return _claim_and_path(source)[0]


def _claim_and_path(source: Source) -> tuple[str, str]:
    if not source.uri.startswith("pvc://"):
        return "", ""
    claim, _, path = source.uri.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")


def _model(source: Source) -> str:
    """The source as the processes spell it."""
    claim, path = _claim_and_path(source)
    if claim:
        return f"{reserved.MODELS_FOLDER}/{path}".rstrip("/")
    return f"{source.uri}@{source.revision}" if source.revision else source.uri


def _common(resource: Resource, source: Source, num_threads: int) -> dict[str, object]:
    spec = resource.spec
    is_cpu = spec.accelerator is Accelerator.CPU
    return {
        "MODEL": _model(source),
        # A pod is reached by its own address, of either family: the processes take this for both.
        "HOST": "0.0.0.0",  # noqa: S104
        "HTTP_PORT": HTTP_PORT,
        "DEVICE": "cpu" if is_cpu else "cuda",
        "DTYPE": spec.model.dtype if spec.model.dtype != PROCESS_DTYPE else None,
        "MAX_MODEL_LEN": spec.model.max_model_len or None,
        "LOOKAHEAD": spec.speculation.lookahead,
        "BRANCHES": spec.speculation.branches,
        "THREADS": num_threads if is_cpu else None,
        "REFLECTION": "true" if spec.observability.reflection else None,
        "TERMINATION_LOG": TERMINATION_LOG,
    }


def _policy(speculation: Speculation) -> dict[str, object]:
    """What a target says of speculation, as far as it is not the processes' own default."""
    default = Speculation()
    settings: dict[str, object] = {}
    if speculation.fan_out != default.fan_out:
        settings["FAN_OUT"] = speculation.fan_out.lower()
    if speculation.backup != default.backup:
        settings["BACKUP"] = speculation.backup.lower()
    if speculation.draft_deadline_milliseconds != default.draft_deadline_milliseconds:
        settings["DRAFT_DEADLINE_MS"] = speculation.draft_deadline_milliseconds
    return settings


def _variables(prefix: str, settings: dict[str, object]) -> list[Object]:
    return [
        {"name": f"{prefix}_{name}", "value": str(value)}
        for name, value in sorted(settings.items())
        if value is not None
    ]


def _identity(prefix: str, cell: int | None) -> list[Object]:
    found: list[Object] = [
        {"name": f"{prefix}_{name}", "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (("POD_NAME", "metadata.name"), ("NODE_NAME", "spec.nodeName"))
    ]
    if cell is not None:
        found.append({"name": f"{prefix}_CELL", "value": str(cell)})
    return found


def _hub(source: Source) -> list[Object]:
    """An engine takes from the cache what was fetched, and asks nobody."""
    if not is_on_hub(source):
        return []
    return [_hub_folder(), {"name": "HF_HUB_OFFLINE", "value": "1"}]


def _hub_folder() -> Object:
    return {"name": "HF_HOME", "value": reserved.HUB_FOLDER}

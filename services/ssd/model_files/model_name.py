"""Names of models: a folder, the embedded pair (``demo://``), or the Hugging Face hub (``hf://``).

Neither torch nor the hub's library is imported, so a wrong name is reported within a second.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ssd import demo
from ssd.engine.checkpoint_format import refused_format
from ssd.engine.config import ModelConfig
from ssd.errors import ModelNotFoundError

_HUB = "hf://"
_NAME_ON_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub."""

    name: str
    """``org/name``."""
    revision: str | None
    """A commit, branch or tag; None for the default branch."""

    @classmethod
    def parse(cls, uri: str) -> "HubModel | None":
        """Return the model of ``hf://org/name@revision``; None for another kind of name."""
        if not uri.startswith(_HUB):
            return None
        name, _, revision = uri.removeprefix(_HUB).partition("@")
        return cls(name, revision or None)


def local_folder(model: str) -> Path | None:
    """Return the folder of a model without download or widening; None for a model on the hub.

    Raises:
        ModelNotFoundError: there is no such folder or demo model.
    """
    if HubModel.parse(model) is not None:
        return None
    if demo.is_demo(model):
        return demo.folder(model)
    folder = Path(model)
    try:
        if (folder / "config.json").is_file():
            return folder
        reason = _why_no_model(folder, model)
    except OSError as error:
        reason = str(error.strerror)
    raise ModelNotFoundError(f"{model}: {reason}")


def check_name(flag: str, model: str) -> None:
    """Refuse a name of no model, with the flag that gave it.

    Raises:
        ModelNotFoundError: there is no such folder or demo model.
    """
    try:
        local_folder(model)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{flag} {error}") from None


def _why_no_model(path: Path, model: str) -> str:
    """Return why a path has no model, and what to use instead."""
    if refusal := refused_format(path):
        return refusal
    if path.is_file():
        return "this is a file; use the folder that contains it, config.json and tokenizer.json"
    if not path.exists() and _NAME_ON_HUB.fullmatch(model):
        return f"there is no such folder; for a model on the hub, use {_HUB}{model}"
    problem = "no config.json in this folder" if path.is_dir() else "there is no such folder"
    return f"{problem}; use a model folder, demo://target, demo://draft or hf://org/name"


def local_shape(model: str) -> ModelConfig | None:
    """Return the shape of a model, from its ``config.json``; None for a model on the hub.

    Raises:
        ModelNotFoundError: there is no such folder or demo model.
        UnsupportedModelError: the engine does not support it.
    """
    if (folder := local_folder(model)) is None:
        return None
    shape = ModelConfig.from_folder(folder)
    factor = demo.widening(model) if demo.is_demo(model) else 1
    return replace(
        shape,
        hidden_size=shape.hidden_size * factor,
        intermediate_size=shape.intermediate_size * factor,
        num_heads=shape.num_heads * factor,
        num_kv_heads=shape.num_kv_heads * factor,
    )

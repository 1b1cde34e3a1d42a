"""``ssd models``: what can be named with ``--target`` and ``--draft`` on this machine."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from ssd import demo

FAMILIES = frozenset({"llama", "qwen3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model folder that runs here."""

    name: str
    """As ``--target`` and ``--draft`` take it."""
    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    weights_bytes: int


def local_models(roots: Iterable[Path]) -> list[Model]:
    """Return the embedded pair and the model folders directly below some folders."""
    found = [_read(f"{demo.SCHEME}{name}", demo.folder(name)) for name in demo.NAMES]
    for root in roots:
        folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
        found += [_read(str(folder), folder) for folder in folders]
    return [model for model in found if model is not None]


def _read(name: str, folder: Path) -> Model | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(config, dict) or config.get("model_type") not in FAMILIES:
        return None
    return Model(
        name=name,
        family=config["model_type"],
        num_layers=int(config.get("num_hidden_layers", 0)),
        hidden_size=int(config.get("hidden_size", 0)),
        vocab_size=int(config.get("vocab_size", 0)),
        weights_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
    )


def models_table(models: Iterable[Model]) -> Table:
    """Return a table of models."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "family", "layers", "width", "vocabulary", "weights"):
        table.add_column(title, justify="left" if title in ("model", "family") else "right")
    for model in models:
        table.add_row(
            model.name,
            model.family,
            str(model.num_layers),
            str(model.hidden_size),
            str(model.vocab_size),
            f"{model.weights_bytes / 1e6:.1f} MB",
        )
    return table

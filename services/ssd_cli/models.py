"""``ssd models``: the models of this machine, as ``--target`` and ``--draft`` name them."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE
from rich.table import Table

from ssd import demo
from ssd.engine.config import FAMILIES
from ssd.errors import SetupError
from ssd.model_files.folder_contents import Model, read_model
from ssd_cli.display import plain_table

PROBE = "ssd.engine.precision"
"""Module that prints the choice of ``--dtype auto``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPrecision:
    """The choice of ``--dtype auto`` on this machine's CPU."""

    dtype: str
    dtype_reason: str


async def auto_precision() -> AutoPrecision:
    """Measure it in a separate process, because it needs torch.

    Raises:
        SetupError: torch cannot be loaded.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", PROBE), stdout=PIPE, stderr=PIPE
    )
    try:
        stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    if process.returncode != 0:
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise SetupError(f"--dtype auto cannot be determined: {last}")
    answer = json.loads(stdout)
    return AutoPrecision(dtype=answer["dtype"], dtype_reason=answer["reason"])


def local_models(roots: Iterable[Path], hub: Path = Path(HF_HUB_CACHE)) -> list[Model]:
    """Return the embedded, the downloaded, and the models in or directly below folders.

    Downloads of unsupported families are left out; other programs use them.
    """
    models = [read_model(f"{demo.SCHEME}{name}", demo.folder(name)) for name in demo.NAMES]
    for snapshot in sorted(hub.glob("models--*--*/snapshots/*")):
        owner, _, name = snapshot.parents[1].name.removeprefix("models--").partition("--")
        model = read_model(f"hf://{owner}/{name}@{snapshot.name}", snapshot)
        models += [model] if model is not None and model.family in FAMILIES else []
    for root in roots:
        models += models_in(root)
    return [model for model in models if model is not None]


def models_in(root: Path) -> list[Model]:
    """Return the models in or directly below a folder; a model has a ``config.json``."""
    folders = [root, *sorted(path for path in root.iterdir() if path.is_dir())]
    models = [read_model(str(folder), folder) for folder in folders]
    return [model for model in models if model is not None]


def models_table(models: Iterable[Model]) -> Table:
    """Return a table of models."""
    numbers = ("layers", "width", "vocabulary", "parameters", "weights")
    table = plain_table("model", "family", right=numbers, no_wrap=True)
    for model in models:
        table.add_row(
            model.name,
            model.family,
            str(model.num_layers),
            str(model.hidden_size),
            str(model.vocab_size),
            f"{model.num_parameters / 1e6:.1f}M",
            f"{model.weights_bytes / 1e6:.1f} MB",
        )
    return table

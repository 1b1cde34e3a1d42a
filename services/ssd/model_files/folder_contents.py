"""What a model folder contains, and why it cannot run, before a process loads it.

Neither torch nor weights are read, so a damaged model is reported within a second.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ssd.engine.config import ModelConfig, read_config
from ssd.engine.models.llama import ignored, shapes
from ssd.errors import SSDError, TokenizerError, WeightsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model folder, and the reason why it cannot run."""

    name: str
    """Value for ``--target`` and ``--draft``."""
    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_parameters: int
    weights_bytes: int
    problem: str = ""
    """Reason why it cannot run, with the file; empty if none was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Sizes from the headers of the weights of a folder, and why the weights cannot be used."""

    num_parameters: int = 0
    num_bytes: int = 0
    problem: str = ""


def problem_of(folder: Path) -> str:
    """Return why the model in a folder cannot run; empty if no reason was found."""
    model = read_model(str(folder), folder)
    return "" if model is None else model.problem


def read_model(name: str, folder: Path) -> Model | None:
    """Return the model in a folder, None if there is no ``config.json``."""
    try:
        if not (folder / "config.json").is_file():
            return None
    except PermissionError:
        # The folder may not be read, for example lost+found of a volume.
        return None
    config: dict[str, Any] = {}
    model, problems = None, []
    try:
        config = read_config(folder)
        model = ModelConfig.from_folder(folder)
    except SSDError as error:
        problems.append(str(error))
    weights = _read_weights(folder, model)
    problems += [weights.problem] if weights.problem else []
    if not problems and (problem := _tokenizer_problem(folder)):
        problems.append(problem)
    return Model(
        name=name,
        family=str(config.get("model_type", "")),
        num_layers=model.num_layers if model else 0,
        hidden_size=model.hidden_size if model else 0,
        vocab_size=model.vocab_size if model else 0,
        num_parameters=weights.num_parameters,
        weights_bytes=weights.num_bytes,
        problem="; ".join(problems),
    )


def _read_weights(folder: Path, model: ModelConfig | None) -> _Weights:
    """Compare the weights of a folder with its config as loading does; read only their headers."""
    # It imports a package of the engine, which other commands do not need.
    from ssd.engine.models.headers import check_headers, read_headers  # noqa: PLC0415

    left_out = ignored(model) if model is not None else frozenset()
    weights = _Weights()
    try:
        headers = read_headers(folder)
        read = [header for name, header in headers.items() if name not in left_out]
        files = {header.path for header in headers.values()}
        weights = _Weights(
            num_parameters=sum(header.num_values for header in read),
            num_bytes=sum(path.stat().st_size for path in files),
        )
        if model is not None:
            check_headers(folder, headers, shapes(model), left_out)
    except WeightsError as error:
        return replace(weights, problem=str(error))
    return weights


def _tokenizer_problem(folder: Path) -> str:
    # A slow import that other commands do not need.
    from ssd.text.tokenizer import load_tokenizer  # noqa: PLC0415

    try:
        load_tokenizer(folder)
    except TokenizerError as error:
        return str(error)
    return ""

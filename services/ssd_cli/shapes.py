"""The shapes of models by name, and what can be checked about a pair before a process starts."""

from pathlib import Path

from ssd.engine.config import ModelConfig
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.parallel.shard import check_shards
from ssd.engine.sizes import num_weights
from ssd.errors import ModelNotFoundError
from ssd.model_files.model_name import HubModel, local_shape


def shape_of(source: str) -> ModelConfig:
    """Return the shape of a known name, a folder, ``demo://`` or a downloaded ``hf://`` model.

    Raises:
        ModelNotFoundError: none of them.
        UnsupportedModelError: the engine does not support it.
    """
    if (shape := KNOWN_SHAPES.get(source.lower())) is not None:
        return shape
    names = ", ".join(KNOWN_SHAPES)
    try:
        downloaded = downloaded_shape(source)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}, or a known shape: {names}") from None
    if downloaded is None:
        raise ModelNotFoundError(
            f"{source}: its config.json is not in the hub's cache of this machine; name a folder "
            f"that contains it, or a known shape: {names}"
        )
    return downloaded


def downloaded_shape(source: str) -> ModelConfig | None:
    """Return the shape of a folder, ``demo://`` or ``hf://``; None for a model not yet downloaded.

    Raises:
        ModelNotFoundError: there is no such folder or demo model, or the name is malformed.
        UnsupportedModelError: the engine does not support it.
    """
    if (on_hub := HubModel.parse(source)) is None:
        return local_shape(source)
    # A slow import that other commands do not need.
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415

    try:
        file = try_to_load_from_cache(on_hub.name, "config.json", revision=on_hub.revision)
    except ValueError as error:
        raise ModelNotFoundError(f"{source}: {error}") from error
    return ModelConfig.from_folder(Path(file).parent) if isinstance(file, str) else None


def check_pair(
    target: ModelConfig | None, draft: ModelConfig | None, tensor_parallel_size: int
) -> str:
    """Check what is known of a pair; return a warning, empty if there is none.

    Raises:
        SettingsError: the target cannot be split into this number of ranks.
    """
    if target is not None:
        check_shards(target, tensor_parallel_size)
    if target is None or draft is None or num_weights(draft) <= num_weights(target):
        return ""
    sizes = [f"{num_weights(model) / 1e6:,.1f}M" for model in (draft, target)]
    return (
        f"the draft has {sizes[0]} parameters and the target {sizes[1]}: a draft should be "
        "smaller; are --target and --draft exchanged?"
    )

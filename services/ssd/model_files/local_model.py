"""The model of a process: its folder, tokenizer and engine shapes, before it is loaded."""

from dataclasses import dataclass, replace
from pathlib import Path

from ssd.engine.attention.paged import make_paged
from ssd.engine.config import (
    BLOCK_SIZES,
    PREFILL_CHUNKS,
    STATIC,
    EngineConfig,
    ModelConfig,
    length_limit,
    usable_token_ids,
)
from ssd.engine.engine_choice import OPENVINO, EngineChoice, choose_engine
from ssd.engine.memory import plan_blocks
from ssd.engine.models.headers import dtypes_of
from ssd.engine.models.llama import ignored
from ssd.engine.parallel.shard import Shard, check_shards, model_of
from ssd.engine.precision import AUTO, keeps_bfloat16
from ssd.engine.sizes import num_weights
from ssd.engine_settings import EngineSettings
from ssd.model_files.model_name import local_folder, local_shape
from ssd.model_files.model_source import resolve
from ssd.ports import Tokenizer
from ssd.text.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model folder on this machine, and how the engine will run it."""

    folder: Path
    tokenizer: Tokenizer
    engine: EngineConfig

    @property
    def num_token_ids(self) -> int:
        """Number of token ids that a prompt can contain and the model can select."""
        return self.engine.num_token_ids or self.tokenizer.vocab_size


def find_model(settings: EngineSettings, *, max_num_seqs: int, branches: int = 0) -> LocalModel:
    """Resolve the source of the model, and read its tokenizer and shapes.

    Args:
        settings: of the process.
        max_num_seqs: maximum number of sequences or sessions of one forward pass.
        branches: of a draft; 0 for a target.

    Raises:
        SetupError: there is no such model, or the engine does not support it.
    """
    folder = resolve(settings.model)
    tokenizer = load_tokenizer(folder)
    model = ModelConfig.from_folder(folder)
    # Before ranks are started, which would each need seconds to report it.
    check_shards(model, settings.num_ranks)
    engine = _engine_config(settings, model, tokenizer, max_num_seqs, branches)
    is_target = branches == 0
    if is_target and settings.weights == AUTO and _keeps_bfloat16(engine, model, folder):
        engine = replace(engine, weights="bfloat16")
    return LocalModel(folder=folder, tokenizer=tokenizer, engine=engine)


def check_model(settings: EngineSettings, *, max_num_seqs: int, branches: int = 0) -> None:
    """Check all that can be checked without the weights. A model on the hub is not looked up.

    Devices, CPUs and free memory are known only on the machine where the process runs. The
    arguments equal the arguments of ``find_model``.

    Raises:
        SetupError: the process would not start.
    """
    model = local_shape(settings.model)
    if model is not None and (folder := local_folder(settings.model)) is not None:
        tokenizer = load_tokenizer(folder)
        engine = _engine_config(settings, model, tokenizer, max_num_seqs, branches)
        check_shards(model, settings.num_ranks)
        if engine.kv_cache_bytes is not None:
            plan_blocks(model_of(model, Shard(0, settings.num_ranks)), engine)


def _engine_config(
    settings: EngineSettings,
    model: ModelConfig,
    tokenizer: Tokenizer,
    max_num_seqs: int,
    branches: int,
) -> EngineConfig:
    size = settings.num_ranks
    choice = choose_engine(
        settings,
        num_weights=num_weights(model),
        head_size=model.head_size,
        is_draft=branches > 0,
    )
    return EngineConfig(
        device=settings.device,
        engine=choice.engine,
        engine_reason=choice.reason,
        dtype=choice.precision.dtype,
        dtype_reason=choice.precision.reason,
        weights=choice.weights,
        threads=max(1, settings.threads // size),
        tensor_parallel_size=size,
        attention=settings.attention,
        block_size=_block_size(settings, choice, model),
        max_model_len=length_limit(settings.max_model_len, model),
        max_num_seqs=max_num_seqs,
        num_columns=settings.num_columns,
        prefill_chunk=settings.prefill_chunk or PREFILL_CHUNKS[choice.engine],
        kv_cache_bytes=settings.kv_cache_bytes or None,
        compile_layers=settings.compile_layers,
        deterministic=settings.deterministic,
        num_token_ids=usable_token_ids(tokenizer.vocab_size, model),
        branches=branches,
    )


def _keeps_bfloat16(engine: EngineConfig, model: ModelConfig, folder: Path) -> bool:
    """Return whether a target keeps the bfloat16 weights of its checkpoint; see ``precision``."""
    return (
        (engine.engine, engine.dtype) == (OPENVINO, "float32")
        and keeps_bfloat16(num_weights(model))
        and dtypes_of(folder, ignored(model)) == {"BF16"}
    )


def _block_size(settings: EngineSettings, choice: EngineChoice, model: ModelConfig) -> int:
    """Return the slots of a KV block, which the engine or its attention backend fixes."""
    if choice.engine != STATIC:
        return BLOCK_SIZES[choice.engine]
    paged = make_paged(
        settings.attention, settings.device, choice.precision.dtype, head_size=model.head_size
    )
    return paged.attention.block_size

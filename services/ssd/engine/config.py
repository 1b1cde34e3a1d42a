"""The shape of a model, and the settings of an engine. Imported without torch."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ssd.errors import ModelNotFoundError, SettingsError, UnsupportedModelError
from ssd.observability.log import get_logger

_log = get_logger(__name__)

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
"""Bytes of a number of each data type."""
STATIC = "static"
"""Name of the engine for GPUs, see ``static_execution``."""
BLOCK_SIZES = {"openvino": 32, "torch": 16}
"""Slots of a KV block by engine; the attention of OpenVINO has no other size. Those of the engine
for GPUs are fixed by its attention backend."""
PREFILL_CHUNKS = {"openvino": 16, "torch": 32, STATIC: 128}
"""Rows of a prefill pass of a target by engine, unless set. On a CPU, a pass takes longer with each
row, and other sequences wait for it. On a GPU, so few rows take about the time of a verify."""
LARGEST_PAGE = 256
"""Slots of a KV block of flash-attn, the largest of all backends."""
MAX_DEFAULT_LEN = 4096
"""Largest length of a sequence if the settings do not contain one."""
_SHARED = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        **_SHARED,
        "num_key_value_heads": None,
        "head_dim": None,
        "max_position_embeddings": 2048,
    },
    "qwen3": {
        **_SHARED,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
}
"""The values of transformers for keys that a ``config.json`` lacks, by family. None: derived from
the width and the number of heads."""
FAMILIES = tuple(DEFAULTS)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
_TRAINED = "original_max_position_embeddings"
_ROTATED = "partial_rotary_factor"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Without one of them, ``adapter_config.json`` describes no adapter of the folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a dense decoder, from its ``config.json``."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read ``config.json``.

        Raises:
            ModelNotFoundError: no such folder, or no readable config in it.
            UnsupportedModelError: another family, or a feature that is not implemented.
        """
        raw = read_config(folder)
        has_adapter = any((folder / name).is_file() for name in _ADAPTER_WEIGHTS)
        if has_adapter and (folder / "adapter_config.json").is_file():
            raise UnsupportedModelError(
                f"{folder}: LoRA adapters (adapter_config.json) are not supported; use a folder of "
                "the merged model, or remove adapter_config.json to use the model without the "
                "adapter"
            )
        family = raw.get("model_type")
        if family not in FAMILIES:
            supported = ", ".join(FAMILIES)
            raise UnsupportedModelError(
                f"{folder}: model_type {family!r} is not supported; supported: {supported}"
            )
        for feature in ("attention_bias", "mlp_bias", "use_sliding_window"):
            if raw.get(feature):
                raise UnsupportedModelError(f"{folder}: {feature}=true is not supported")
        if raw.get("quantization_config"):
            raise UnsupportedModelError(f"{folder}: quantised checkpoints are not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(f"{folder}: hidden_act {raw['hidden_act']!r}, not 'silu'")
        raw = DEFAULTS[family] | raw
        try:
            sizes = _sizes(raw)
            theta, scaling = _rope(folder, raw, sizes["max_position_embeddings"])
            return cls(
                family=family,
                vocab_size=sizes["vocab_size"],
                hidden_size=sizes["hidden_size"],
                num_layers=sizes["num_hidden_layers"],
                num_heads=sizes["num_attention_heads"],
                num_kv_heads=sizes["num_key_value_heads"],
                head_size=sizes["head_dim"],
                intermediate_size=sizes["intermediate_size"],
                rms_norm_eps=_positive("rms_norm_eps", raw["rms_norm_eps"]),
                rope_theta=theta,
                rope_scaling=scaling,
                max_position_embeddings=sizes["max_position_embeddings"],
                tie_word_embeddings=bool(raw["tie_word_embeddings"]),
            )
        except KeyError as error:
            raise ModelNotFoundError(f"{folder}/config.json lacks {error.args[0]!r}") from error
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            # A value of another type, also inside of rope_scaling, an impossible size, or infinity.
            raise ModelNotFoundError(f"{folder}/config.json: {error}") from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ModelNotFoundError: no such folder, or no readable config in it.
    """
    if not folder.is_dir():
        raise ModelNotFoundError(f"{folder}: no such model folder")
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFoundError(f"{folder}: no config.json in this folder")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelNotFoundError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ModelNotFoundError(f"{path}: not a JSON object")
    return raw


def _sizes(raw: dict[str, Any]) -> dict[str, int]:
    """Return the sizes of a config with all keys; ValueError if no model can have them."""
    heads, width = (_whole(key, raw[key]) for key in ("num_attention_heads", "hidden_size"))
    derived = {"num_key_value_heads": heads, "head_dim": width // max(1, heads)}
    raw = raw | {key: size for key, size in derived.items() if raw[key] is None}
    sizes = {key: _whole(key, raw[key]) for key in _SIZES}
    for key, size in sizes.items():
        if size < 1:
            raise ValueError(f"{key} is {size}, must be at least 1")
    if heads % sizes["num_key_value_heads"]:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{sizes['num_key_value_heads']}"
        )
    return sizes


def _whole(key: str, value: Any) -> int:
    """Return a whole number of a config; ValueError if it is none."""
    try:
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        whole = None
    if whole is None or (isinstance(value, float) and whole != value):
        raise ValueError(f"{key} is {value!r}, must be a whole number")
    return whole


def _rope(folder: Path, raw: dict[str, Any], longest: int) -> tuple[float, RopeScaling | None]:
    # Newer configs keep theta beside the scaling in rope_parameters. If a config has both forms,
    # the scaling and the theta of rope_scaling count, as in transformers.
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = _positive("rope_theta", rope.get("rope_theta") or raw["rope_theta"])
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UnsupportedModelError(f"{folder}: rope scaling {kind!r}, not 'llama3' or 'default'")
    if (rotated := rope.get(_ROTATED, raw.get(_ROTATED))) not in (None, 1):
        raise UnsupportedModelError(f"{folder}: {_ROTATED} {rotated!r} is not supported")
    keys = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (_positive(key, rope[key]) for key in keys)
    # As in transformers, the value beside the scaling comes before the one in it.
    trained = _positive(_TRAINED, raw.get(_TRAINED, rope.get(_TRAINED, longest)))
    return theta, RopeScaling(
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=int(trained),
    )


def _positive(key: str, value: Any) -> float:
    """Return a number of a config above 0; ValueError if it is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise ValueError(f"{key} is {value!r}, must be a number above 0")
    return float(value)


def length_limit(requested: int, model: ModelConfig) -> int:
    """Return the largest length of a sequence, in tokens.

    ``requested`` is the length in the settings; 0 takes the model's, at most ``MAX_DEFAULT_LEN``.

    Raises:
        SettingsError: the settings exceed the length of the model.
    """
    longest = model.max_position_embeddings
    if requested > longest:
        raise SettingsError(
            f"max_model_len {requested} is over the model's own {longest}; lower it"
        )
    return requested or min(longest, MAX_DEFAULT_LEN)


def usable_token_ids(tokenizer_size: int, model: ModelConfig) -> int:
    """Return the number of token ids that a model can read and choose.

    An embedding can be padded beyond the tokenizer (Qwen3). A tokenizer can have tokens that were
    added without resizing the embedding: the model is served, and texts with such a token are
    refused.
    """
    if tokenizer_size > model.vocab_size:
        _log.warning(
            "tokens_without_embedding", tokenizer=tokenizer_size, embedding=model.vocab_size
        )
    return min(tokenizer_size, model.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of an engine, which fix all shapes.

    ``engine_choice`` and ``local_model`` choose which engine has which weights and ranks.
    """

    max_model_len: int
    """Largest number of tokens of a sequence, prompt and continuation."""
    max_num_seqs: int = 16
    """Largest number of sequences (or draft sessions) of a forward pass."""
    num_columns: int = 7
    """Columns of a verify, P = K + 1."""
    branches: int = 0
    """N branches of each session for a draft; 0 for a target."""
    device: str = "cpu"
    engine: str = "torch"
    """``openvino``, ``static`` or ``torch``; see ``ssd.engine.engine_choice`` for ``auto``."""
    engine_reason: str = "set explicitly"
    """Reason of the engine, for logs."""
    dtype: str = "float32"
    """``bfloat16`` or ``float32``; see ``ssd.engine.precision`` for ``auto``."""
    dtype_reason: str = "set explicitly"
    """Reason of the dtype, for logs and status."""
    weights: Literal["same", "bfloat16", "int8", "int4"] = "same"
    """Format of the matrices: ``same`` as the dtype, or a smaller one with float32 arithmetic."""
    threads: int = 1
    """Threads of a pass on a CPU, of each rank; torch takes those of its process."""
    tensor_parallel_size: int = 1
    """Number of ranks that share the model, each with its own process."""
    attention: str = "auto"
    """Attention backend of the engine static; ``auto`` takes the fastest of the device."""
    block_size: int = 16
    """Slots of a KV block, tokens."""
    prefill_chunk: int = 128
    """Rows of a prefill pass; chunks of a prompt start at its multiples."""
    step_tokens: int = 256
    """Most prompt tokens that one pass stores, in whole chunks."""
    context_chunk: int = 256
    """Positions of one attention chunk; chunks are merged in a fixed order. A multiple of
    ``block_size``."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache of each rank; None takes half of the free memory, at most what
    ``max_num_seqs`` sequences of ``max_model_len`` need."""
    compile_layers: bool = False
    """Whether the engine static compiles the parts of a layer around its attention."""
    deterministic: bool = False
    """Every verify has one shape, so that the bits of a row depend on its sequence only."""
    num_token_ids: int | None = None
    """Ids from this one on are padding of the embedding, which is never chosen and never run."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SettingsError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.compile_layers and self.engine != STATIC:
            raise SettingsError(
                f"compile_layers needs engine static, not {self.engine}; set it to false"
            )
        if self.context_chunk % self.block_size:
            raise SettingsError(
                f"context_chunk {self.context_chunk} is not a multiple of block_size "
                f"{self.block_size}"
            )

    @property
    def precision(self) -> str:
        """The dtype and the format of the weights, for status."""
        return self.dtype if self.weights == "same" else f"{self.dtype}, {self.weights} weights"

    @property
    def lookahead(self) -> int:
        """Tokens of a full proposal, K."""
        return self.num_columns - 1

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of a sequence of ``max_model_len``, the width of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def kv_dtype(self) -> str:
        """Data type of the KV entries. The graphs of a draft read them in float32."""
        return "float32" if self.branches and self.engine == "openvino" else self.dtype

    @property
    def branch_counts(self) -> tuple[int, ...]:
        """Numbers of branches that a table may have, most first: N, N/2 and N/4."""
        return tuple(sorted({max(1, self.branches // part) for part in (1, 2, 4)}, reverse=True))

    @property
    def table_lengths(self) -> tuple[int, ...]:
        """Columns of a table that is one pass: K, and K/2 for texts of low acceptance."""
        most = self.lookahead
        return tuple(sorted({most} if self.branches == 1 else {most, -(-most // 2)}))

    @property
    def verify_columns(self) -> tuple[int, ...]:
        """Column counts of a verify to warm up, ascending; the last one fits every proposal.

        The smaller one is used if the warm-up finds the same bits with both
        (``TargetRunner.verify_columns``).
        """
        one_shape = self.deterministic or self.num_columns == 1
        return (self.num_columns,) if one_shape else (1, self.num_columns)


def sequence_buckets(engine: EngineConfig) -> list[int]:
    """Return a few sequence counts, to which a pass can be padded, ascending."""
    if engine.deterministic:
        return [engine.max_num_seqs]
    buckets = [1]
    while buckets[-1] < engine.max_num_seqs:
        buckets.append(min(buckets[-1] * 2, engine.max_num_seqs))
    return buckets

"""Which part of a model each rank has: pure functions.

Query heads, units of the MLP and token ids are split evenly. Key/value heads are split too, or
copied if there are fewer than ranks. A rank's part is a model of its own with fewer heads, units
and token ids, so layers, KV cache and attention know no rank.

Of a linear whose outputs are split (query, key, value, gate, up, head), a rank has rows. Of one
whose inputs are split (output, down), it has columns, and the results of all ranks are added.
"""

from dataclasses import dataclass, replace

from ssd.engine.config import ModelConfig
from ssd.errors import SettingsError

SIZES = (1, 2, 4, 8)
"""Numbers of ranks of a target."""
IDS_OF_A_UNIT = 4
"""Vocabularies are split at multiples of it: a counter of the noise gives the words of 4 ids."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank among all of them."""

    rank: int = 0
    size: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether the model is not split."""
        return self.size == 1


WHOLE = Shard()
"""The only rank of a model that is not split."""


Part = tuple[slice, ...]
"""The part of a stored matrix that a rank reads, as an index: some rows, or some columns."""


def check_shards(model: ModelConfig, size: int) -> None:
    """Check that a model can be split.

    Raises:
        SettingsError: names the number that does not allow it, and the sizes that the model allows.
    """
    problem = _problem(model, size)
    if problem is not None:
        allowed = ", ".join(str(ranks) for ranks in SIZES if _problem(model, ranks) is None)
        raise SettingsError(f"tensor_parallel_size {size}: {problem}; this model allows {allowed}")


def _problem(model: ModelConfig, size: int) -> str | None:
    heads, kv_heads = model.num_heads, model.num_kv_heads
    if heads % size:
        return f"it does not divide the {heads} attention heads (num_attention_heads)"
    if kv_heads % size and size % kv_heads:
        return (
            f"it neither divides the {kv_heads} key/value heads (num_key_value_heads) nor is a "
            "multiple of them"
        )
    if model.intermediate_size < size:
        return f"the MLP has only {model.intermediate_size} units (intermediate_size)"
    if _num_units(model) < size:
        return f"the vocabulary has only {model.vocab_size} token ids (vocab_size)"
    return None


def heads_of(model: ModelConfig, shard: Shard) -> range:
    """Return the query heads of a rank."""
    return _even_part(model.num_heads, shard)


def kv_heads_of(model: ModelConfig, shard: Shard) -> range:
    """Return the key/value heads of a rank: those of its query heads."""
    if model.num_kv_heads >= shard.size:
        return _even_part(model.num_kv_heads, shard)
    head = shard.rank * model.num_kv_heads // shard.size
    return range(head, head + 1)


def units_of(model: ModelConfig, shard: Shard) -> range:
    """Return the units of a rank's MLP."""
    return _even_part(model.intermediate_size, shard)


def ids_of(model: ModelConfig, shard: Shard) -> range:
    """Return the token ids of a rank; the first one is a multiple of ``IDS_OF_A_UNIT``."""
    units = _even_part(_num_units(model), shard)
    stop = min(units.stop * IDS_OF_A_UNIT, model.vocab_size)
    return range(units.start * IDS_OF_A_UNIT, stop)


def ids_of_ranks(model: ModelConfig, size: int) -> list[range]:
    """Return the token ids of each of ``size`` ranks."""
    return [ids_of(model, Shard(rank, size)) for rank in range(size)]


def model_of(model: ModelConfig, shard: Shard) -> ModelConfig:
    """Return the shape of a rank's part, which is a model with fewer heads, units and ids."""
    return replace(
        model,
        num_heads=len(heads_of(model, shard)),
        num_kv_heads=len(kv_heads_of(model, shard)),
        intermediate_size=len(units_of(model, shard)),
        vocab_size=len(ids_of(model, shard)),
    )


def rows(indices: range, width: int = 1) -> Part:
    """Return the rows of some indices with ``width`` rows each."""
    return (slice(indices.start * width, indices.stop * width),)


def columns(indices: range, width: int = 1) -> Part:
    """Return the columns of some indices with ``width`` columns each."""
    return (slice(None), slice(indices.start * width, indices.stop * width))


def _num_units(model: ModelConfig) -> int:
    return -(-model.vocab_size // IDS_OF_A_UNIT)


def _even_part(count: int, shard: Shard) -> range:
    """Return consecutive numbers below ``count``; the sizes of two ranks differ by at most one."""
    return range(count * shard.rank // shard.size, count * (shard.rank + 1) // shard.size)

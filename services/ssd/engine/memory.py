"""The number of KV blocks that fit into memory."""

from pathlib import Path

import torch

from ssd.engine.config import STATIC, EngineConfig, ModelConfig
from ssd.engine.kv_cache.storage import EntryMap, KVStorage
from ssd.engine.parallel.group import ALONE, Group
from ssd.engine.precision import DTYPES
from ssd.engine.sizes import (
    branch_logits_bytes,
    bytes_per_entry,
    graph_output_bytes,
    segment_entries,
    segment_sessions,
)
from ssd.errors import MemoryBudgetError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
_CGROUP_FILES = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)
"""Limit, use, statistics and the name of cached bytes in them, by the version of control groups."""


def free_bytes(device: str, meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the memory that can still be allocated, in bytes.

    In a container, this is the limit of the control group without its working set. Cached file
    pages, which include mapped weights, do not count: the kernel frees them when memory is short.
    """
    if device != "cpu":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit_name, used_name, stat_name, cached_name in _CGROUP_FILES:
        limit_file = cgroup / limit_name
        if limit_file.is_file() and (limit := limit_file.read_text().strip()) != "max":
            pairs = (line.split() for line in (cgroup / stat_name).read_text().splitlines())
            cached = int(dict(pairs).get(cached_name, 0))
            used = int((cgroup / used_name).read_text()) - cached
            available = min(available, int(limit) - used)
    return max(0, available)


def plan_blocks(model: ModelConfig, engine: EngineConfig, reserved_bytes: int = 0) -> int:
    """Return the number of KV blocks, block 0 included.

    At most the blocks of ``max_num_seqs`` sequences of ``max_model_len`` tokens.

    Args:
        model: its shape.
        engine: the size of the cache, if it is set.
        reserved_bytes: memory that the engine allocates later.

    Raises:
        MemoryBudgetError: not one such sequence fits; the message contains the numbers.
    """
    entry_bytes = bytes_per_entry(model, engine.kv_dtype)
    block_bytes = entry_bytes * engine.block_size
    per_sequence = engine.blocks_per_sequence
    useful = 1 + engine.max_num_seqs * per_sequence
    budget = engine.kv_cache_bytes
    if budget is None:
        free = free_bytes(engine.device) - branch_logits_bytes(model, engine) - reserved_bytes
        if engine.engine == STATIC and engine.device != "cpu":
            # Graphs are captured later.
            free -= graph_output_bytes(model, engine)
        budget = int(max(0, free) * engine.kv_cache_fraction)
        if engine.branches and engine.engine == "openvino":
            budget //= 2  # Each table gathers a copy of the entries of its sessions.
        if engine.device == "cpu":
            budget //= engine.tensor_parallel_size  # The ranks share the memory.
    fitting = (budget - segment_entries(engine) * entry_bytes) // block_bytes
    if fitting < 1 + per_sequence:
        needed = (1 + per_sequence) * block_bytes + segment_entries(engine) * entry_bytes
        raise MemoryBudgetError(
            f"the KV cache can use {budget} bytes, and one sequence of max_model_len "
            f"{engine.max_model_len} needs {needed}; lower max_model_len or max_num_seqs, or "
            "raise kv_cache_bytes"
        )
    return min(useful, fitting)


def allocate_storage(
    model: ModelConfig, engine: EngineConfig, group: Group = ALONE, reserved_bytes: int = 0
) -> KVStorage:
    """Allocate the KV storage of an engine; all ranks of a group have the same blocks.

    See ``plan_blocks`` for the arguments.

    Raises:
        MemoryBudgetError: not one sequence of maximum length fits.
    """
    num_blocks = group.smallest(plan_blocks(model, engine, reserved_bytes))
    sessions = segment_sessions(engine)
    entries = EntryMap(num_blocks, engine.block_size, engine.num_columns, engine.branches, sessions)
    return KVStorage(model, entries, DTYPES[engine.kv_dtype], engine.device)

"""The number of KV blocks that fit into memory."""

import math
from dataclasses import dataclass
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
MAX_LAYER_VALUES = 2**31 - 1
"""Largest number of values in the keys of a layer: FlexAttention's kernel of prompts computes their
places in 32 bits. A draft of few layers reaches it on a large GPU."""
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _GroupFiles:
    """Files of a control group, by the version of control groups."""

    controller: str
    """Name of the controller in the list of own groups."""
    folder: str
    """Folder of the controller below the mount of all control groups."""
    limit: str
    used: str
    cached: str
    """Name of cached bytes in the statistics."""

    def left_bytes(self, group: Path) -> float:
        """Return what a group can still allocate; infinite without a limit."""
        limit_file = group / self.limit
        if not limit_file.is_file() or (limit := limit_file.read_text().strip()) == "max":
            return math.inf
        pairs = (line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached = int(dict(pairs).get(self.cached, 0))
        return int(limit) - (int((group / self.used).read_text()) - cached)


_VERSIONS = (
    _GroupFiles("", "", "memory.max", "memory.current", "inactive_file"),
    _GroupFiles(
        "memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    ),
)


def free_bytes(
    device: str, meminfo: Path = MEMINFO, cgroup: Path = CGROUP, own_groups: Path = OWN_GROUPS
) -> int:
    """Return the memory that can still be allocated, in bytes.

    With control groups, as in a container or a unit of systemd, this is at most the limit of each
    group of the process without its working set. Cached file pages, which include mapped weights,
    do not count: the kernel frees them when memory is short.
    """
    if device != "cpu":
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available: float = int(fields["MemAvailable"].split()[0]) * 1024
    for files in _VERSIONS:
        for group in _own_groups(files.controller, own_groups):
            available = min(available, files.left_bytes(cgroup / files.folder / group))
    return int(max(0, available))


def _own_groups(controller: str, own_groups: Path) -> set[Path]:
    """Return the group of the process and all groups that contain it, relative to the mount.

    The root is always one of them. A container may see only its own group, at the root, while the
    list has a path of the host. Groups that are not mounted have no files.
    """
    groups = {Path()}
    lines = own_groups.read_text().splitlines() if own_groups.is_file() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = Path(path.lstrip("/"))
            groups |= {own, *own.parents}
    return {group for group in groups if ".." not in group.parts}


def plan_blocks(model: ModelConfig, engine: EngineConfig, reserved_bytes: int = 0) -> int:
    """Return the number of KV blocks, block 0 included.

    At most the blocks of ``max_num_seqs`` sequences of ``max_model_len`` tokens. The engine
    allocates ``reserved_bytes`` later.

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
        budget = max(0, free) // 2
        if engine.branches and engine.engine == "openvino":
            budget //= 2  # Each table gathers a copy of the entries of its sessions.
        if engine.device == "cpu":
            budget //= engine.tensor_parallel_size  # The ranks share the memory.
    num_entries = budget // entry_bytes
    if engine.engine == STATIC:
        num_entries = min(num_entries, MAX_LAYER_VALUES // (model.num_kv_heads * model.head_size))
    fitting = (num_entries - segment_entries(engine)) // engine.block_size
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

    See ``plan_blocks``.

    Raises:
        MemoryBudgetError: not one sequence of maximum length fits.
    """
    num_blocks = group.smallest(plan_blocks(model, engine, reserved_bytes))
    sessions = segment_sessions(engine)
    entries = EntryMap(num_blocks, engine.block_size, engine.num_columns, engine.branches, sessions)
    return KVStorage(model, entries, DTYPES[engine.kv_dtype], engine.device)

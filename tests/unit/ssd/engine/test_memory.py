from dataclasses import replace
from pathlib import Path

import pytest

from ssd.engine import memory
from ssd.engine.config import STATIC, EngineConfig
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.memory import free_bytes, plan_blocks
from ssd.engine.sizes import sampling_bytes, segment_entries
from ssd.errors import MemoryBudgetError

MODEL = replace(KNOWN_SHAPES["llama-3.2-1b"], num_layers=1, num_kv_heads=1, head_size=8)
SLOT_BYTES = 2 * 8 * 4
ENGINE = EngineConfig(max_model_len=40, max_num_seqs=2, dtype="float32", kv_cache_bytes=10**9)
BLOCKS_A_SEQUENCE = 3


def plan(engine: EngineConfig) -> int:
    return plan_blocks(MODEL, engine)


def test_no_more_blocks_than_all_sequences_can_use() -> None:
    assert plan(ENGINE) == 1 + 2 * BLOCKS_A_SEQUENCE


def test_a_small_budget_is_filled() -> None:
    budget = 5 * 16 * SLOT_BYTES + 1
    assert plan(replace(ENGINE, kv_cache_bytes=budget)) == 5


def test_kernels_address_all_keys_of_a_layer_in_32_bits() -> None:
    values = MODEL.num_kv_heads * MODEL.head_size
    large = replace(ENGINE, max_model_len=2**20, max_num_seqs=2**9, kv_cache_bytes=2**40)
    draft = replace(large, engine=STATIC, branches=4)
    num_entries = 16 * plan(draft) + segment_entries(draft)
    assert 2**31 - 16 * values <= num_entries * values < 2**31
    assert plan(replace(draft, engine="openvino")) > 2**31 // values // 16


def test_one_sequence_of_full_length_must_fit_or_the_error_has_the_numbers() -> None:
    needed = (1 + BLOCKS_A_SEQUENCE) * 16 * SLOT_BYTES
    assert plan(replace(ENGINE, kv_cache_bytes=needed)) == 1 + BLOCKS_A_SEQUENCE
    with pytest.raises(MemoryBudgetError, match=rf"{needed - 1} bytes.* 40 needs {needed};"):
        plan(replace(ENGINE, kv_cache_bytes=needed - 1))


def test_the_segments_of_a_draft_are_part_of_the_budget() -> None:
    segments = 2 * 7 * (1 + 4) * SLOT_BYTES
    pages = (1 + BLOCKS_A_SEQUENCE) * 16 * SLOT_BYTES
    draft = replace(ENGINE, branches=4, kv_cache_bytes=segments + pages)
    assert plan(draft) == 1 + BLOCKS_A_SEQUENCE
    with pytest.raises(MemoryBudgetError):
        plan(replace(draft, kv_cache_bytes=segments + pages - 1))


def test_without_a_size_the_cache_takes_half_of_the_memory_that_is_not_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = replace(ENGINE, kv_cache_bytes=None)
    needed = (1 + BLOCKS_A_SEQUENCE) * 16 * SLOT_BYTES
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 2 * needed + 1000)
    assert plan_blocks(MODEL, target, 1000) == 1 + BLOCKS_A_SEQUENCE
    with pytest.raises(MemoryBudgetError):
        plan_blocks(MODEL, target, 1001)


def test_the_memory_of_kept_branch_logits_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = replace(ENGINE, branches=4, kv_cache_bytes=None)
    kept = 2 * 4 * 7 * MODEL.vocab_size * 4
    needed = 2 * 7 * (1 + 4) * SLOT_BYTES + (1 + BLOCKS_A_SEQUENCE) * 16 * SLOT_BYTES
    monkeypatch.setattr(memory, "free_bytes", lambda _device: kept + 2 * needed)
    assert plan(draft) == 1 + BLOCKS_A_SEQUENCE
    monkeypatch.setattr(memory, "free_bytes", lambda _device: kept + 2 * needed - 1)
    with pytest.raises(MemoryBudgetError):
        plan(draft)


@pytest.mark.parametrize(
    ("branches", "kept_rows", "shared_rows"),
    # Of 1 and 2 sequences: verifies of 7 rows, or proposals and tables of 4, 2 and 1 branches.
    [(0, (1 + 2) * 7, 2 * 7), (4, (1 + 2) * (7 + 4 + 2 + 1), 2 * 7)],
)
def test_the_logits_of_cuda_graphs_are_reserved(
    branches: int, kept_rows: int, shared_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = replace(ENGINE, engine=STATIC, device="cuda:0", branches=branches, kv_cache_bytes=None)
    logits = (kept_rows + shared_rows + 2 * branches * 7) * 4 * MODEL.vocab_size
    needed = 3 * 7 * (1 + branches) * SLOT_BYTES if branches else 0
    needed += (1 + BLOCKS_A_SEQUENCE) * 16 * SLOT_BYTES
    monkeypatch.setattr(memory, "free_bytes", lambda _device: logits + 2 * needed)
    assert plan(on_gpu) == 1 + BLOCKS_A_SEQUENCE
    monkeypatch.setattr(memory, "free_bytes", lambda _device: logits + 2 * needed - 1)
    with pytest.raises(MemoryBudgetError):
        plan(on_gpu)


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 9000 kB\nMemAvailable:  4000 kB\n")
    return path


def test_without_a_limit_the_available_memory_counts(meminfo: Path, tmp_path: Path) -> None:
    assert free_bytes("cpu", meminfo, tmp_path / "none") == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes("cpu", meminfo, tmp_path) == 4000 * 1024


@pytest.mark.parametrize(
    ("limit", "used", "stat", "cached"),
    [
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_in_a_container_the_limit_without_the_working_set_counts(
    meminfo: Path, tmp_path: Path, limit: str, used: str, stat: str, cached: str
) -> None:
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / used).write_text("900000\n")
    (tmp_path / stat).write_text(f"anon 300000\n{cached} 500000\n")
    assert free_bytes("cpu", meminfo, tmp_path) == 600000
    (tmp_path / used).write_text("1900000\n")
    assert free_bytes("cpu", meminfo, tmp_path) == 0


@pytest.mark.parametrize(
    ("folder", "names", "own"),
    [
        (
            "",
            ("memory.max", "memory.current", "inactive_file"),
            "1:cpu:/other\n0::/a.slice/b.service\n",
        ),
        (
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            "7:cpu,memory:/a.slice/b.service\n0::/other\n",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_outside_a_container_the_smallest_rest_of_the_own_groups_counts(
    meminfo: Path, tmp_path: Path, folder: str, names: tuple[str, str, str], own: str
) -> None:
    limit, used, cached = names
    own_groups = tmp_path / "own"
    own_groups.write_text(own)

    def set_limit(group: str, limit_bytes: int) -> None:
        path = tmp_path / folder / group
        path.mkdir(parents=True, exist_ok=True)
        (path / limit).write_text(f"{limit_bytes}\n")
        (path / used).write_text("300000\n")
        (path / "memory.stat").write_text(f"{cached} 100000\n")

    set_limit("a.slice/b.service", 1_000_000)
    set_limit("other", 250_000)
    assert free_bytes("cpu", meminfo, tmp_path, own_groups) == 800_000
    set_limit("a.slice", 900_000)
    assert free_bytes("cpu", meminfo, tmp_path, own_groups) == 700_000
    # Of a process outside the namespace of the mount.
    own_groups.write_text("0::/../a.slice\n9:memory:/../a.slice\n")
    assert free_bytes("cpu", meminfo, tmp_path, own_groups) == 4000 * 1024


def test_noise_and_logits_of_a_target_are_reserved() -> None:
    engine = replace(ENGINE, max_num_seqs=2, num_columns=7)
    # 2 x 7 rows of noise and 15 ahead, 7 of logits and 7 of their copy, for each sequence.
    assert sampling_bytes(MODEL, engine) == 2 * 43 * MODEL.vocab_size * 4

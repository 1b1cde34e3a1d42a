from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.engine.config import EngineConfig
from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.kv_cache.storage import EntryMap, KVStorage
from ssd.engine.sizes import bytes_per_entry, segment_entries

SIZES = st.integers(1, 5)
MODEL = replace(KNOWN_SHAPES["llama-3.2-1b"], num_layers=1, num_kv_heads=1, head_size=6)


@settings(deadline=None)
@given(num_blocks=SIZES, block_size=SIZES, columns=SIZES, branches=SIZES, sessions=SIZES)
def test_pages_and_segments_are_disjoint_and_cover_all_entries(
    num_blocks: int, block_size: int, columns: int, branches: int, sessions: int
) -> None:
    entries = EntryMap(num_blocks, block_size, columns, branches, sessions)
    everyone_B = torch.arange(sessions)
    parts = (
        entries.paged(torch.arange(num_blocks)[None]),
        entries.proposal(everyone_B),
        entries.own(everyone_B),
    )
    used = torch.cat([part.flatten() for part in parts])
    assert used.sort().values.tolist() == list(range(entries.num_entries))


def test_a_block_table_gives_the_entries_of_positions_in_order() -> None:
    entries = EntryMap(4, 2, 1, 0, 0)
    assert entries.paged(torch.tensor([[3, 1]])).tolist() == [[6, 7, 2, 3]]


def test_columns_of_early_steps_are_contiguous_entries() -> None:
    own_BPN = EntryMap(1, 1, 3, 4, 2).own(torch.tensor([1]))
    first = int(own_BPN[0, 0, 0])
    assert own_BPN[0, :2].flatten().tolist() == list(range(first, first + 8))


def test_a_target_has_no_segments() -> None:
    assert EntryMap(4, 2, 7, 0, 0).num_entries == 8
    assert segment_entries(EngineConfig(max_model_len=8)) == 0


def test_the_number_of_segment_entries_equals_the_layout() -> None:
    engine = EngineConfig(max_model_len=8, max_num_seqs=3, num_columns=4, branches=5)
    assert segment_entries(engine) == EntryMap(0, 1, 4, 5, 3).num_entries


def test_copying_entries_that_overlap_reads_before_it_writes() -> None:
    storage = KVStorage(MODEL, EntryMap(4, 1, 1, 0, 0), torch.float32, "cpu")
    storage.entries_L2ZW += torch.arange(4.0)[:, None]
    storage.copy(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3]))
    assert storage.entries_L2ZW[0, 1, :, 0].tolist() == [0.0, 0.0, 1.0, 2.0]


def test_storage_starts_as_zeros_of_the_planned_size() -> None:
    storage = KVStorage(MODEL, EntryMap(4, 2, 1, 0, 0), torch.bfloat16, "cpu")
    assert not storage.entries_L2ZW.any()
    assert storage.entries_L2ZW.nbytes == 8 * bytes_per_entry(MODEL, "bfloat16")


def test_values_that_are_not_finite_are_stored_as_zero() -> None:
    entries = EntryMap(1, 4, 1, 0, 0)
    storage = KVStorage(MODEL, entries, torch.float32, "cpu")
    keys_RGE = torch.ones((2, *storage.shape_GE))
    values_RGE = torch.full((2, *storage.shape_GE), 2.0)
    keys_RGE[1, 0, 0], values_RGE[1, 0, 1], values_RGE[1, 0, 2] = torch.nan, torch.inf, -torch.inf
    storage.write(0, torch.tensor([3, 1]), keys_RGE, values_RGE)
    assert torch.equal(storage.keys[0][3], keys_RGE[0])
    assert torch.equal(storage.values[0][3], values_RGE[0])
    assert storage.keys[0][1, 0].tolist() == [0.0, *[1.0] * (storage.shape_GE[1] - 1)]
    assert storage.values[0][1, 0].tolist() == [2.0, 0.0, 0.0, *[2.0] * (storage.shape_GE[1] - 3)]

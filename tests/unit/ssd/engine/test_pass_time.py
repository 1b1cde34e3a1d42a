"""The parts of a predicted pass: what each of them depends on."""

from dataclasses import replace

import pytest

from ssd.engine.known_shapes import KNOWN_SHAPES
from ssd.engine.pass_time import (
    BANDWIDTH_SHARE,
    GPUS,
    Cpu,
    PassShape,
    PassTime,
    WeightFormat,
    cpu_pass_time,
    pass_time,
)
from ssd.engine.sizes import bytes_per_entry, pass_weights

MODEL = KNOWN_SHAPES["llama-3.1-8b"]
H100 = GPUS["h100"]
ONE_ROW = PassShape(rows=1, sequences=1, context_tokens=1000)


def seconds(shape: PassShape, num_gpus: int = 1) -> PassTime:
    return pass_time(MODEL, H100, shape, num_gpus=num_gpus)


def test_reading_takes_the_bytes_over_the_bandwidth_that_a_copy_reaches() -> None:
    bandwidth = H100.bandwidth * BANDWIDTH_SHARE
    time = seconds(ONE_ROW)
    assert time.weights == pytest.approx(2 * pass_weights(MODEL) / bandwidth)
    assert time.kv == pytest.approx(1000 * bytes_per_entry(MODEL, "bfloat16") / bandwidth)
    assert time.all_reduces == 0


def test_ranks_share_weights_and_cache_and_pay_for_all_reduces() -> None:
    one, four = seconds(ONE_ROW), seconds(ONE_ROW, num_gpus=4)
    assert four.weights == pytest.approx(one.weights / 4)
    assert four.kv == pytest.approx(one.kv / 4)
    assert four.all_reduces > 0
    assert four.seconds < one.seconds


def test_ranks_beyond_the_kv_heads_hold_copies_of_the_cache() -> None:
    few_heads = replace(MODEL, num_kv_heads=2)
    two = pass_time(few_heads, H100, ONE_ROW, num_gpus=2)
    eight = pass_time(few_heads, H100, ONE_ROW, num_gpus=8)
    assert eight.kv == two.kv


def test_few_rows_are_free_and_many_rows_are_bound_by_the_products() -> None:
    few = seconds(replace(ONE_ROW, rows=8))
    assert few.seconds == pytest.approx(seconds(ONE_ROW).seconds)
    many = seconds(replace(ONE_ROW, rows=4096))
    assert many.products > many.weights
    assert many.seconds == many.products + many.kernels


def test_a_row_of_a_sequence_reads_the_context_of_the_sequence_once() -> None:
    assert seconds(replace(ONE_ROW, rows=24)).kv == seconds(ONE_ROW).kv
    assert seconds(replace(ONE_ROW, sequences=2)).kv == 2 * seconds(ONE_ROW).kv


def test_a_step_of_a_tree_has_more_kernels() -> None:
    assert seconds(replace(ONE_ROW, is_tree=True)).kernels > seconds(ONE_ROW).kernels


FORMAT = WeightFormat(bytes_per_weight=1, bytes_per_head_weight=1, core_bytes=4e9, core_flops=1e11)


def on_cpus(cores: int, rows: int = 1, bandwidth: float = 100e9) -> float:
    shape = PassShape(rows=rows, sequences=1, context_tokens=0)
    return cpu_pass_time(MODEL, Cpu(num_cores=cores, bandwidth=bandwidth), shape, FORMAT)


def test_few_cores_are_bound_by_unpacking_and_many_by_the_memory() -> None:
    weights = pass_weights(MODEL)
    row = 2 * weights / FORMAT.core_flops
    assert on_cpus(2) == pytest.approx(weights / 8e9 + row / 2)
    assert on_cpus(50) == pytest.approx(weights / 100e9 + row / 50)


def test_each_row_of_a_pass_on_cpus_adds_its_products() -> None:
    first, second, third = (on_cpus(8, rows) for rows in (1, 2, 3))
    assert third - second == pytest.approx(second - first)
    assert on_cpus(16, 3) - on_cpus(16, 2) == pytest.approx((third - second) / 2)

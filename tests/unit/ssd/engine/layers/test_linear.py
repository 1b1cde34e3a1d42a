import math
from collections.abc import Callable, Iterator

import pytest
import torch
from tests.packing import AVX2_ERROR, fail_to_pack_bfloat16, needs_packed_bfloat16
from torch import Tensor

from ssd.engine.layers import linear
from ssd.engine.layers.linear import Linear, packing_problem

Warnings = list[tuple[str, dict[str, object]]]
BOTH = [
    torch.float32,
    pytest.param(torch.bfloat16, marks=needs_packed_bfloat16),
]
SHAPES = [(40, 24), (128, 128), (640, 384), (384, 1024), (96, 1536)]
VERIFY_ROWS = (2, 3, 4, 7, 8, 14, 16, 28, 56, 112)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Warnings]:
    """What is logged as a warning, in a process that has neither probed nor warned yet."""
    found: Warnings = []
    monkeypatch.setattr(
        linear._log, "warning", lambda event, **fields: found.append((event, fields))
    )
    packing_problem.cache_clear()
    linear._warn_plain.cache_clear()
    yield found
    monkeypatch.undo()
    packing_problem.cache_clear()
    linear._warn_plain.cache_clear()


def drawn(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / math.sqrt(shape[1])).to(dtype)


def uneven(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of both signs between 1 and 4096: their sums depend on the order."""
    generator = torch.Generator().manual_seed(seed)
    mantissa = 1 + torch.randint(0, 128, shape, generator=generator) / 128
    sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    exponent = torch.randint(0, 12, shape, generator=generator).float()
    numbers: Tensor = sign * mantissa * torch.exp2(exponent)
    return numbers.to(dtype)


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("rows", [1, 7, 24, 128])
def test_products_of_packed_and_plain_weights_are_equal(dtype: torch.dtype, rows: int) -> None:
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    weight_OI, input_RI = drawn((40, 24), dtype), drawn((rows, 24), dtype, seed=rows)
    packed, plain = Linear(weight_OI), Linear(weight_OI, packed=False)
    assert packed.is_packed
    assert not plain.is_packed
    torch.testing.assert_close(packed(input_RI), plain(input_RI), atol=tolerance, rtol=tolerance)
    assert packed(input_RI).dtype == dtype


@pytest.mark.parametrize("dtype", BOTH)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_products_sum_in_one_order_for_every_number_of_rows(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    packed = Linear(uneven(shape, dtype, seed=1))
    input_RI = uneven((max(VERIFY_ROWS), shape[1]), dtype, seed=2)
    all_RO = packed(input_RI)
    for rows in VERIFY_ROWS:
        assert torch.equal(packed(input_RI[:rows]), all_RO[:rows]), rows
        assert torch.equal(packed(input_RI[-rows:]), all_RO[-rows:]), rows


def test_other_dtypes_stay_plain_without_a_warning(warnings: Warnings) -> None:
    weight_OI = torch.eye(3, dtype=torch.float64)
    layer = Linear(weight_OI)
    assert not layer.is_packed
    input_RI = torch.arange(6, dtype=torch.float64).view(2, 3)
    assert torch.equal(layer(input_RI), input_RI)
    assert warnings == []


def test_bfloat16_on_a_cpu_that_cannot_pack_it_is_plain_with_one_warning(
    warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_pack_bfloat16(monkeypatch)
    weight_OI, input_RI = drawn((40, 24), torch.bfloat16), drawn((7, 24), torch.bfloat16, seed=7)
    layers = [Linear(weight_OI) for _ in range(3)]
    assert not any(layer.is_packed for layer in layers)
    assert torch.equal(layers[0](input_RI), torch.nn.functional.linear(input_RI, weight_OI))
    ((event, fields),) = warnings
    assert event == "plain_linears"
    assert fields["dtype"] == "bfloat16"
    assert fields["reason"] == AVX2_ERROR.partition("\n")[0]
    assert Linear(drawn((40, 24), torch.float32)).is_packed
    assert len(warnings) == 1


def raise_always(*_arguments: object) -> Tensor:
    raise RuntimeError("no such kernel\nat line 7")


@pytest.mark.parametrize(
    ("operation", "broken", "problem"),
    [
        ("_reorder_linear_weight", raise_always, "no such kernel"),
        ("_linear_pointwise", raise_always, "no such kernel"),
        ("_linear_pointwise", lambda *_arguments: torch.zeros(2, 64), "products"),
    ],
    ids=["packing raises", "multiplying raises", "products are wrong"],
)
def test_a_private_operation_that_does_not_work_is_never_fatal(
    operation: str,
    broken: Callable[..., Tensor],
    problem: str,
    warnings: Warnings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, operation, broken)
    assert_plain_with_one_warning(warnings, problem)


def test_private_operations_that_are_missing_are_never_fatal(
    warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert_plain_with_one_warning(warnings, "has no attribute '_reorder_linear_weight'")


def assert_plain_with_one_warning(warnings: Warnings, problem: str) -> None:
    weight_OI, input_RI = drawn((8, 4), torch.float32), drawn((3, 4), torch.float32, seed=3)
    layers = [Linear(weight_OI), Linear(weight_OI)]
    assert not any(layer.is_packed for layer in layers)
    assert torch.equal(layers[0](input_RI), input_RI @ weight_OI.mT)
    ((_, fields),) = warnings
    assert problem in str(fields["reason"])


def test_one_weight_that_cannot_be_packed_stays_plain_beside_packed_ones(
    warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def refuse_small(weight_OI: Tensor, rows: int) -> Tensor:
        packed: Tensor = raise_always() if len(weight_OI) == 8 else reorder(weight_OI, rows)
        return packed

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse_small)
    assert Linear(drawn((16, 4), torch.float32)).is_packed
    assert not Linear(drawn((8, 4), torch.float32)).is_packed
    ((_, fields),) = warnings
    assert fields["reason"] == "no such kernel"

import pytest
import torch

from ssd.engine.layers.linear import Linear, can_pack


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 7, 24, 128])
def test_packed_weights_say_what_plain_ones_say(
    dtype: torch.dtype, tolerance: float, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight_OI = (torch.randn((40, 24), generator=generator) / 24**0.5).to(dtype)
    input_RI = torch.randn((rows, 24), generator=generator).to(dtype)
    assert can_pack(weight_OI)
    packed, plain = Linear(weight_OI), Linear(weight_OI, packed=False)
    torch.testing.assert_close(packed(input_RI), plain(input_RI), atol=tolerance, rtol=tolerance)
    assert packed(input_RI).dtype == dtype


def test_weights_that_can_not_be_packed_stay_plain() -> None:
    weight_OI = torch.eye(3, dtype=torch.float64)
    assert not can_pack(weight_OI)
    input_RI = torch.arange(6, dtype=torch.float64).view(2, 3)
    assert torch.equal(Linear(weight_OI)(input_RI), input_RI)

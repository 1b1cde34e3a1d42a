"""The device without hardware reports what a GPU would wait for."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ssd.testing.fake_device import fake_device

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "mask as index": lambda x: x[x > 0],
    "mixed devices": lambda x: x + torch.zeros(4, 6),
    "index of the host": lambda x: x[torch.tensor([0, 1])],
    "gather by an index of the host": lambda x: x.gather(1, torch.zeros((4, 6), dtype=torch.int64)),
}


@pytest.mark.parametrize("name", READS)
def test_a_hidden_synchronisation_or_a_mixed_device_raises(name: str) -> None:
    with fake_device() as device:
        tensor = torch.zeros((4, 6), device=device.name)
        with pytest.raises(RuntimeError):
            READS[name](tensor)


def test_copies_to_the_host_are_counted_and_copies_to_the_device_are_not() -> None:
    with fake_device() as device:
        tensor = torch.zeros((4, 6)).to(device.name)
        tensor.copy_(torch.ones((4, 6)))
        assert device.num_reads == 0
        tensor.cpu()
        torch.zeros((4, 6)).copy_(tensor)
    assert device.num_reads == 2

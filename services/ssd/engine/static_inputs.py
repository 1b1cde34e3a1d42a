"""The input buffers of a pass over static tensors."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class Inputs:
    """The integers of a pass: written on the host, copied to the device in one transfer."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], padding: Mapping[str, int], device: str
    ) -> None:
        """Construct; ``padding`` by name, 0 if there is none."""
        sizes = [math.prod(shape) for shape in shapes.values()]
        is_pinned = device.startswith("cuda")
        self._on_host = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=is_pinned)
        self._on_device = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._copied = torch.cuda.Event() if is_pinned else None
        self._padding = padding
        self._host = {
            name: part.numpy().reshape(shape)
            for (name, shape), part in zip(shapes.items(), self._on_host.split(sizes), strict=True)
        }
        self.device = {
            name: part.view(shape)
            for (name, shape), part in zip(
                shapes.items(), self._on_device.split(sizes), strict=True
            )
        }
        """The inputs on the device, by name, always in the same place."""

    def write(self, **values: Tensor) -> None:
        """Write a batch, pad it, and start to copy it to the device.

        Args:
            values: int64 on the CPU, by name, each at most as large as its input. Inputs that are
                not named are padding.
        """
        if self._copied is not None:
            # The last copy may still read the host's buffer.
            self._copied.synchronize()
        for name, buffer in self._host.items():
            buffer[...] = self._padding.get(name, 0)
            if name in values:
                rows = values[name].numpy()
                buffer[tuple(slice(size) for size in rows.shape)] = rows
        self._on_device.copy_(self._on_host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

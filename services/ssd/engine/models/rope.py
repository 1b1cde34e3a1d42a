"""Rotary positions: tables are computed once and gathered once per pass."""

import math

import torch
from torch import Tensor

from ssd.engine.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """Return the angular speed of each pair of a head's dimensions, fp32 [E/2]."""
    exponent_E = torch.arange(0, config.head_size, 2, dtype=torch.int64).float() / config.head_size
    speed_E = 1.0 / (config.rope_theta**exponent_E)
    return speed_E if config.rope_scaling is None else _scale(speed_E, config.rope_scaling)


def _scale(speed_E: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide the speed of long waves by ``factor``; interpolate towards short ones (Llama 3.1)."""
    wavelength_E = 2 * math.pi / speed_E
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    slowed_E = speed_E / scaling.factor
    blend_E = (
        scaling.original_max_position_embeddings / wavelength_E - scaling.low_freq_factor
    ) / (scaling.high_freq_factor - scaling.low_freq_factor)
    mixed_E = (1 - blend_E) * slowed_E + blend_E * speed_E
    result_E = torch.where(wavelength_E > longest, slowed_E, speed_E)
    return torch.where((wavelength_E <= longest) & (wavelength_E >= shortest), mixed_E, result_E)


class RotaryTable:
    """cos and sin of every position; the sine includes the sign of the rotation."""

    def __init__(self, config: ModelConfig, max_len: int, like: Tensor) -> None:
        """Compute on the CPU; ``like`` gives dtype and device."""
        angle_SE = torch.outer(torch.arange(max_len).float(), inverse_frequencies(config))
        cos_SE, sin_SE = angle_SE.cos(), angle_SE.sin()
        self._cos_SE = torch.cat((cos_SE, cos_SE), dim=1).to(like.dtype).to(like.device)
        signed_sin_SE = torch.cat((-sin_SE, sin_SE), dim=1)
        self._signed_sin_SE = signed_sin_SE.to(like.dtype).to(like.device)

    def gather(self, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin of positions, [R, 1, E] each."""
        cos_RE = self._cos_SE.index_select(0, positions_R)
        sin_RE = self._signed_sin_SE.index_select(0, positions_R)
        return cos_RE[:, None], sin_RE[:, None]


def rotate(heads_RHE: Tensor, cos_R1E: Tensor, signed_sin_R1E: Tensor) -> Tensor:
    """Rotate each head's halves against each other, [R, H, E]."""
    swapped_RHE = heads_RHE.roll(heads_RHE.shape[-1] // 2, -1)
    return torch.addcmul(heads_RHE * cos_R1E, swapped_RHE, signed_sin_R1E)

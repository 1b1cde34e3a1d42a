"""Attention by torch's fused CPU kernel, which returns the log-sum-exp besides."""

import torch
from torch import Tensor


class FlashCpuAttention:
    """The kernel behind ``scaled_dot_product_attention`` on CPUs, bf16 and fp32."""

    name = "cpu"

    def attend(
        self, queries_BGUE: Tensor, keys_BSGE: Tensor, values_BSGE: Tensor, mask_B1US: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``AttentionBackend.attend``."""
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 the only one that returns the mass
        out_BGUE, mass_BGU = attend(
            queries_BGUE,
            keys_BSGE.transpose(1, 2),
            values_BSGE.transpose(1, 2),
            0.0,
            is_causal=False,
            attn_mask=mask_B1US,
        )
        return out_BGUE, mass_BGU

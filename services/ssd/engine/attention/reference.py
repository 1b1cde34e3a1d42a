"""The reference for the other backends: explicit softmax in float32."""

import torch
from torch import Tensor


class ReferenceAttention:
    """Attention as the formula defines it."""

    name = "reference"

    def attend(
        self, queries_BGUE: Tensor, keys_BSGE: Tensor, values_BSGE: Tensor, mask_B1US: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See ``AttentionBackend.attend``."""
        scale = queries_BGUE.shape[-1] ** -0.5
        keys_BGSE = keys_BSGE.transpose(1, 2).float()
        values_BGSE = values_BSGE.transpose(1, 2).float()
        scores_BGUS = queries_BGUE.float() @ keys_BGSE.transpose(2, 3) * scale + mask_B1US.float()
        mass_BGU = torch.logsumexp(scores_BGUS, dim=-1)
        weights_BGUS = torch.exp(scores_BGUS - mass_BGU[..., None])
        return (weights_BGUS @ values_BGSE).to(queries_BGUE.dtype), mass_BGU

    def attend_whole(
        self, queries_BGUE: Tensor, keys_BSGE: Tensor, values_BSGE: Tensor, mask_B1US: Tensor
    ) -> Tensor:
        """See ``AttentionBackend.attend_whole``."""
        return self.attend(queries_BGUE, keys_BSGE, values_BSGE, mask_B1US)[0]

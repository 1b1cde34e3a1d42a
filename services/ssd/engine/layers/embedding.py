"""The embedding of token ids; a rank has the rows of its own ids."""

import torch
from torch import Tensor
from torch.nn import functional

from ssd.engine.parallel.group import Group


class Embedding:
    """Rows by token id. Of another rank's ids, this rank contributes zeros to the sum."""

    def __init__(self, weight_VD: Tensor, group: Group, first_id: int) -> None:
        self._weight_VD = weight_VD
        self._group = group
        self._first_id = first_id

    def __call__(self, tokens_R: Tensor) -> Tensor:
        """Return [R, D]."""
        if self._group.shard.is_whole:
            return functional.embedding(tokens_R, self._weight_VD)
        row_R = tokens_R - self._first_id
        is_own_R = (row_R >= 0) & (row_R < len(self._weight_VD))
        own_RD = functional.embedding(row_R.where(is_own_R, 0), self._weight_VD)
        # ``where`` and not a product: the weight may contain NaN.
        return self._group.add(torch.where(is_own_R[:, None], own_RD, 0.0))

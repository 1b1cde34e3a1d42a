"""Penalties of one sequence: lower logits of the tokens that are already present.

A CPU reads and writes only the logits of present tokens: of a large vocabulary they are few. A
device has one operation for all logits instead, since the number of present tokens has no bound.
Both compute a logit with the same expression, so it has the same value.

Letters: I present tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Tokens

import numpy as np
import torch
from torch import Tensor

from ssd.engine.sampling.keyed import to_device
from ssd.engine.sampling.logits import penalized
from ssd.types import SamplingParams, TokenId
from ssd_target.decoding.sequence import Sequence


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether tokens that are present have other logits."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
    )


def ids_on(device: str, token_ids: Tokens[int]) -> Tensor:
    """Copy ids to a device, int64."""
    # For the tokens of a long prompt, torch takes three times the time of numpy.
    return to_device(torch.from_numpy(np.array(token_ids, dtype=np.int64)), device)


class Penalties(ABC):
    """The penalties of one sequence. Step thread only.

    The occurrences of tokens are counted once, on the device of the logits.
    """

    def __init__(self, sequence: Sequence, vocab_size: int, device: str) -> None:
        self._sequence = sequence
        self._device = device
        self._counts_V = torch.zeros(vocab_size, device=device)
        self._is_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        # Only this penalty reads which tokens the prompt has.
        if sequence.sampling.repetition_penalty != 1.0:
            self._is_prompt_V.index_fill_(0, ids_on(device, sequence.prompt_ids), True)  # noqa: FBT003 - the value
        self._num_counted = sequence.num_prompt

    @abstractmethod
    def apply(self, rows_CV: Tensor, proposed: Tokens[TokenId], first_column: int) -> Tensor:
        """Return logits after the penalties; see ``LogitsSteps.apply``. It may overwrite them."""

    def _count_new(self) -> bool:
        """Count the tokens since the last call; false if there are none."""
        tokens = self._sequence.tokens
        if len(tokens) == self._num_counted:
            return False
        self._add(ids_on(self._device, tokens[self._num_counted :]), 1.0)
        self._num_counted = len(tokens)
        return True

    def _add(self, ids_I: Tensor, value: float) -> None:
        values = torch.full((), value, device=self._device)
        self._counts_V.index_put_((ids_I,), values, True)  # noqa: FBT003 - accumulate

    def _penalized(self, logits_CV: Tensor, counts_CV: Tensor, is_prompt_V: Tensor) -> Tensor:
        sampling = self._sequence.sampling
        return penalized(
            logits_CV,
            counts_CV,
            is_prompt_V,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )


class HostPenalties(Penalties):
    """Penalties on the CPU, of the logits of present tokens only."""

    def __init__(self, sequence: Sequence, vocab_size: int, device: str) -> None:
        super().__init__(sequence, vocab_size, device)
        self._present_I = self._present()

    def apply(self, rows_CV: Tensor, proposed: Tokens[TokenId], first_column: int) -> Tensor:
        """See ``Penalties``."""
        if self._count_new():
            self._present_I = self._present()
        for column, row_V in enumerate(rows_CV, first_column):
            before_I = ids_on(self._device, proposed[:column])
            self._add(before_I, 1.0)
            # A token that is here twice is computed twice, with one result.
            ids_I = torch.cat((self._present_I, before_I))
            # Brackets would be the same, and take four times the time.
            vectors = (row_V, self._counts_V, self._is_prompt_V)
            lower_I = self._penalized(*(each_V.index_select(0, ids_I) for each_V in vectors))
            row_V.scatter_(0, ids_I, lower_I)
            self._add(before_I, -1.0)
        return rows_CV

    def _present(self) -> Tensor:
        return ((self._counts_V > 0) | self._is_prompt_V).nonzero().squeeze(1)


class DevicePenalties(Penalties):
    """Penalties on a device, of all logits and columns together."""

    def apply(self, rows_CV: Tensor, proposed: Tokens[TokenId], first_column: int) -> Tensor:
        """See ``Penalties``."""
        self._count_new()
        counts_CV = self._counts_before(len(rows_CV), proposed, first_column)
        return self._penalized(rows_CV, counts_CV, self._is_prompt_V)

    def _counts_before(
        self, num_columns: int, proposed: Tokens[TokenId], first_column: int
    ) -> Tensor:
        """Return the occurrences of each token among the new tokens before each column."""
        counts_CV = self._counts_V.repeat(num_columns, 1)
        followed = [
            (row, proposed[index])
            for row in range(num_columns)
            for index in range(first_column + row)
        ]
        if followed:
            rows_I, ids_I = (ids_on(self._device, each) for each in zip(*followed, strict=True))
            counts_CV.index_put_((rows_I, ids_I), torch.ones((), device=self._device), True)  # noqa: FBT003 - accumulate
        return counts_CV

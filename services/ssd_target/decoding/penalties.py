"""Penalties of one sequence on the CPU: lower logits of the tokens that are already present.

A CPU reads and writes only the logits of present tokens: of a large vocabulary they are few. A
device has one operation for all logits of all sequences instead; see ``DeviceSteps``. Both compute
a logit with the same expression.

Letters: I present tokens.
"""

from collections.abc import Sequence as Tokens

import numpy as np
import torch
from torch import Tensor

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


def as_ids(token_ids: Tokens[int]) -> Tensor:
    """Return ids as int64."""
    # For the tokens of a long prompt, torch takes three times the time of numpy.
    return torch.from_numpy(np.array(token_ids, dtype=np.int64))


class Penalties:
    """The penalties of one sequence. Step thread only. Occurrences of tokens are counted once."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self._sequence = sequence
        self._counts_V = torch.zeros(vocab_size)
        self._is_prompt_V = torch.zeros(vocab_size, dtype=torch.bool)
        # Only this penalty reads which tokens the prompt has.
        if sequence.sampling.repetition_penalty != 1.0:
            self._is_prompt_V.index_fill_(0, as_ids(sequence.prompt_ids), True)  # noqa: FBT003 - the value
        self._num_counted = sequence.num_prompt
        self._present_I = self._present()

    def apply(self, row_V: Tensor, proposed: Tokens[TokenId]) -> None:
        """Overwrite the logits of the row that follows these proposed tokens."""
        tokens, sampling = self._sequence.tokens, self._sequence.sampling
        if len(tokens) > self._num_counted:
            self._add(as_ids(tokens[self._num_counted :]), 1.0)
            self._num_counted = len(tokens)
            self._present_I = self._present()
        before_I = as_ids(proposed)
        self._add(before_I, 1.0)
        # A token that is here twice is computed twice, with one result.
        ids_I = torch.cat((self._present_I, before_I))
        # Brackets would be the same, and take four times the time.
        vectors = (row_V, self._counts_V, self._is_prompt_V)
        lower_I = penalized(
            *(each_V.index_select(0, ids_I) for each_V in vectors),
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )
        row_V.scatter_(0, ids_I, lower_I)
        self._add(before_I, -1.0)

    def _present(self) -> Tensor:
        return ((self._counts_V > 0) | self._is_prompt_V).nonzero().squeeze(1)

    def _add(self, ids_I: Tensor, value: float) -> None:
        self._counts_V.index_put_((ids_I,), torch.tensor(value), True)  # noqa: FBT003 - accumulate

"""The steps of all sequences of a round together, on the device of the logits.

A device takes about the same time for the rows of one sequence and of all, while each operation
costs the host some microseconds. So the host only gathers ids, and copies them at once.

Letters: S slots, X rows of the sequences that have steps, I ids.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ssd.engine.sampling.keyed import to_device
from ssd.engine.sampling.logits import best_logprobs, filtered, penalized
from ssd.types import TokenId
from ssd_target.decoding.logits_steps import LogitsSteps, as_ids, has_penalties, row_filters
from ssd_target.decoding.sequence import Sequence

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one sequence that verification can read."""

    steps: LogitsSteps
    proposed: tuple[TokenId, ...]
    index: int
    """Of the sequence in the round."""
    first: int
    """Index of its first row among the rows X."""

    @property
    def count(self) -> int:
        """Rows of the sequence."""
        return len(self.proposed) + 1

    @property
    def columns(self) -> Ints:
        """Columns of its rows in the round."""
        return np.arange(self.count)

    @property
    def rows(self) -> Ints:
        """Indices of its rows among the rows X."""
        return self.first + self.columns


def step_rows(
    steps_of: Iterable[LogitsSteps | None], proposals: Rows[tuple[TokenId, ...]]
) -> list[StepRows]:
    """Return the rows of the sequences of a round that have steps."""
    parts: list[StepRows] = []
    first = 0
    for index, (steps, proposed) in enumerate(zip(steps_of, proposals, strict=True)):
        if steps is not None:
            parts.append(StepRows(steps, proposed, index, first))
            first += parts[-1].count
    return parts


class DeviceSteps:
    """The steps of the sequences in all slots. Step thread only."""

    def __init__(self, num_slots: int, vocab_size: int, device: str) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = device
        self._penalties: _DevicePenalties | None = None
        """None before the first sequence that has penalties."""
        bytes_BB = np.arange(256, dtype=np.uint8)[:, None]
        flags_B8 = np.unpackbits(bytes_BB, axis=1, bitorder="little").view(np.bool_)
        self._flags_of_bytes_B8 = to_device(torch.from_numpy(flags_B8), device)
        self._minus_infinity = torch.full((), -torch.inf, device=device)

    def admit(self, sequence: Sequence) -> None:
        """Begin with a sequence in its slot."""
        if has_penalties(sequence.sampling):
            if self._penalties is None:
                self._penalties = _DevicePenalties(self._num_slots, self._vocab_size, self._device)
            self._penalties.admit(sequence)

    def scores(self, parts: Rows[StepRows], logits_XV: Tensor) -> Tensor:
        """Return the logits of all rows after the steps, fp32 [X, V]; see ``HostSteps.scores``.

        The logits stay as they are.
        """
        scores_XV = logits_XV
        if any(part.steps.changes_logits for part in parts):
            scores_XV = logits_XV.clone()
            self._penalize(parts, scores_XV)
            self._add_biases(parts, scores_XV)
            self._ban_ends(parts, scores_XV)
            self._apply_grammars(parts, scores_XV)
        if any(part.steps.has_filters for part in parts):
            counts = [part.count for part in parts]
            filters = row_filters([part.steps for part in parts], counts, self._device)
            scores_XV = filtered(scores_XV, filters)
        return scores_XV

    def set_logprobs(self, parts: Rows[StepRows], logits_XV: Tensor, chosen_X: Tensor) -> None:
        """Set the log-probabilities of the requests that ask for them, after one copy to the host.

        ``logits_XV`` is the output of the model.
        """
        wanted: dict[int, list[StepRows]] = {}
        for part in parts:
            if part.steps.sampling.logprobs is not None:
                wanted.setdefault(part.steps.sampling.logprobs, []).append(part)
        if not wanted:
            return
        # The order of equal logits can depend on the number of tokens, so that is no maximum.
        found = []
        for count, of_count in wanted.items():
            (rows_R,) = _ids_on(self._device, _rows(of_count))
            ids_RN, logprobs_RN = best_logprobs(logits_XV[rows_R], chosen_X[rows_R], count)
            # Both are exact in float64.
            found.append(torch.stack((ids_RN.double(), logprobs_RN.double())))
        on_host = torch.cat([each_2RN.flatten() for each_2RN in found]).cpu()
        flat = on_host.split([each_2RN.numel() for each_2RN in found])
        for of_count, each_2RN, values in zip(wanted.values(), found, flat, strict=True):
            of_parts = values.view(each_2RN.shape).split([part.count for part in of_count], dim=1)
            for part, (ids_CN, logprobs_CN) in zip(of_count, of_parts, strict=True):
                part.steps.set_logprobs(ids_CN.long(), logprobs_CN)

    def _penalize(self, parts: Rows[StepRows], scores_XV: Tensor) -> None:
        parts = _of(parts, lambda steps: has_penalties(steps.sampling))
        if parts:
            assert self._penalties is not None
            self._penalties.apply(parts, scores_XV)

    def _add_biases(self, parts: Rows[StepRows], scores_XV: Tensor) -> None:
        parts = _of(parts, lambda steps: bool(steps.sampling.logit_bias))
        if not parts:
            return
        rows_I = np.concatenate([part.rows.repeat(part.steps.bias_ids_I.size) for part in parts])
        ids_I = np.concatenate([np.tile(part.steps.bias_ids_I, part.count) for part in parts])
        biases_I = np.concatenate([np.tile(part.steps.biases_I, part.count) for part in parts])
        places = tuple(_ids_on(self._device, rows_I, ids_I))
        values_I = to_device(torch.from_numpy(biases_I), self._device)
        # No id is twice in a row.
        scores_XV.index_put_(places, scores_XV[places] + values_I)

    def _ban_ends(self, parts: Rows[StepRows], scores_XV: Tensor) -> None:
        """Ban the ending tokens before the least number of tokens, where no grammar does it."""
        parts = _of(parts, lambda steps: steps.num_banned() > 0 and steps.sequence.grammar is None)
        if not parts:
            return
        rows, ids = [], []
        for part in parts:
            banned = part.rows[: part.steps.num_banned()]
            rows.append(banned.repeat(len(part.steps.ending_ids)))
            ids.append(np.tile(np.array(part.steps.ending_ids, dtype=np.int64), len(banned)))
        places = tuple(_ids_on(self._device, np.concatenate(rows), np.concatenate(ids)))
        scores_XV.index_put_(places, self._minus_infinity)

    def _apply_grammars(self, parts: Rows[StepRows], scores_XV: Tensor) -> None:
        parts = _of(parts, lambda steps: steps.sequence.grammar is not None)
        if not parts:
            return
        # All grammars are of one tokenizer, so they have the same number of words.
        bits_RW = np.concatenate(
            [part.steps.allowed(part.proposed, 0, part.count) for part in parts]
        )
        bytes_RB = to_device(torch.from_numpy(bits_RW.view(np.uint8)), self._device)
        # An index of bytes would be a mask.
        allowed_RV = self._flags_of_bytes_B8[bytes_RB.int()].flatten(1)[:, : self._vocab_size]
        # Logits can have more columns than the tokenizer has tokens.
        allowed_RV = pad(allowed_RV, (0, self._vocab_size - allowed_RV.shape[1]))
        (rows_R,) = _ids_on(self._device, _rows(parts))
        scores_RV = scores_XV[rows_R].masked_fill_(~allowed_RV, -torch.inf)
        scores_XV.index_copy_(0, rows_R, scores_RV)


class _DevicePenalties:
    """The penalties of the sequences in all slots: 5 S V bytes on the device.

    Occurrences of tokens are counted once.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: str) -> None:
        self._device = device
        self._counts_SV = torch.zeros((num_slots, vocab_size), device=device)
        self._is_prompt_SV = torch.zeros((num_slots, vocab_size), dtype=torch.bool, device=device)
        self._one = torch.ones((), device=device)
        self._num_counted_S = np.zeros(num_slots, dtype=np.int64)
        self._values_3S = np.zeros((3, num_slots), dtype=np.float32)
        """Repetition, presence and frequency penalty."""

    def admit(self, sequence: Sequence) -> None:
        """Begin with a sequence in its slot."""
        slot, sampling = sequence.slot, sequence.sampling
        self._counts_SV[slot].zero_()
        self._is_prompt_SV[slot].zero_()
        # Only this penalty reads which tokens the prompt has.
        if sampling.repetition_penalty != 1.0:
            ids_I = to_device(as_ids(sequence.prompt_ids), self._device)
            self._is_prompt_SV[slot].index_fill_(0, ids_I, True)  # noqa: FBT003 - the value
        self._num_counted_S[slot] = sequence.num_prompt
        self._values_3S[:, slot] = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )

    def apply(self, parts: Rows[StepRows], scores_XV: Tensor) -> None:
        """Overwrite the logits of some sequences by those after their penalties."""
        slots = np.array([part.steps.sequence.slot for part in parts])
        tokens_of = [part.steps.sequence.tokens for part in parts]
        num_counted = self._num_counted_S[slots].tolist()
        new_of = [tokens[num:] for tokens, num in zip(tokens_of, num_counted, strict=True)]
        self._num_counted_S[slots] = [len(tokens) for tokens in tokens_of]
        slots_of_rows = slots.repeat([part.count for part in parts])
        new_slots_I, new_ids_I, slots_R, rows_R, before_rows_I, before_ids_I = _ids_on(
            self._device,
            slots.repeat([len(new) for new in new_of]),
            np.fromiter(chain.from_iterable(new_of), np.int64),
            slots_of_rows,
            _rows(parts),
            *_tokens_before(parts),
        )
        self._counts_SV.index_put_((new_slots_I, new_ids_I), self._one, True)  # noqa: FBT003 - accumulate
        counts_RV = self._counts_SV[slots_R]
        counts_RV.index_put_((before_rows_I, before_ids_I), self._one, True)  # noqa: FBT003 - accumulate
        values_3R = to_device(torch.from_numpy(self._values_3S[:, slots_of_rows]), self._device)
        repetition_R1, presence_R1, frequency_R1 = values_3R[:, :, None]
        lower_RV = penalized(
            scores_XV[rows_R],
            counts_RV,
            self._is_prompt_SV[slots_R],
            repetition=repetition_R1,
            presence=presence_R1,
            frequency=frequency_R1,
        )
        scores_XV.index_copy_(0, rows_R, lower_RV)


def _ids_on(device: str, *arrays: Ints) -> list[Tensor]:
    """Copy arrays of ids to a device, at once."""
    together = torch.from_numpy(np.concatenate(arrays))
    return list(to_device(together, device).split([array.size for array in arrays]))


def _of(parts: Rows[StepRows], is_wanted: Callable[[LogitsSteps], bool]) -> list[StepRows]:
    return [part for part in parts if is_wanted(part.steps)]


def _rows(parts: Rows[StepRows]) -> Ints:
    return np.concatenate([part.rows for part in parts])


def _tokens_before(parts: Rows[StepRows]) -> tuple[Ints, Ints]:
    """Return each pair of a row, counted within these parts, and a proposed token before it."""
    rows, ids = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    first = 0
    for part in parts:
        row_I, index_I = _pairs(part.count)
        rows.append(first + row_I)
        ids.append(np.array(part.proposed, dtype=np.int64)[index_I])
        first += part.count
    return np.concatenate(rows), np.concatenate(ids)


@cache
def _pairs(num_rows: int) -> tuple[Ints, Ints]:
    """Return each pair of a row and an earlier one."""
    return np.tril_indices(num_rows, -1)

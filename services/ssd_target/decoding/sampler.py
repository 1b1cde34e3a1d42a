"""The target's own choice at each row of a round, on the CPU or on the device of the model.

On the CPU, noise costs as much as a forward pass of a small model: it is computed once for each
position, while the drafts work. A device computes it in the registers that hold the logits.

*Decision*: verification, look-up and the next inputs stay on the host, with every device.
*Because*: streams and commits need the tokens there, and tables arrive there. For 16 sequences on
one busy core, the three took 53, 28 and 84 us. *Not chosen*: all three on the device, which needs
the tables there before the verify ends, and a second look-up on the host. *Revisit when* frames
arrive in device memory (``channel: nccl``) and host work is above .3 ms in a round on GPUs.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from itertools import product
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ssd.engine.batch import StoredNoise
from ssd.engine.config import EngineConfig
from ssd.engine.rank_loop import SplitTarget
from ssd.engine.sampling.choose import choose_row
from ssd.engine.sampling.host_noise import gumbel_by_torch
from ssd.engine.sampling.keyed import NoiseKeys, choose_of_keys, compiled_on, packed, to_device
from ssd.speculation.noise import NoiseRing
from ssd.types import NO_TOKEN, PositionLogprobs, TokenId
from ssd_target.decoding.device_steps import DeviceSteps, StepRows, step_rows
from ssd_target.decoding.logits_steps import HostSteps, LogitsSteps, has_steps
from ssd_target.decoding.sequence import Sequence

Ints = NDArray[np.int64]
Proposal = tuple[TokenId, ...]


class Choose(Protocol):
    """Selects a token of each row; see ``SplitTarget.choose``."""

    def __call__(
        self, logits_RV: torch.Tensor, keys_4R: torch.Tensor, *, is_warm: bool
    ) -> torch.Tensor:
        """Return the token of each row, int64 [R]."""


class Sampler(ABC):
    """Selects the target's tokens with the noise and the steps of each slot. Step thread only."""

    def __init__(self, engine: EngineConfig, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._temperature_S = np.zeros(engine.max_num_seqs, dtype=np.float32)
        self._steps: dict[int, LogitsSteps] = {}
        """Steps by slot, of the sequences that have some."""

    def admit(self, sequence: Sequence) -> None:
        """Assign the noise of a sequence's seed to its slot.

        A preempted sequence is admitted again, with the tokens that it has emitted.
        """
        self._temperature_S[sequence.slot] = sequence.sampling.temperature
        if has_steps(sequence.sampling):
            self._steps[sequence.slot] = LogitsSteps(sequence, self._vocab_size)

    def release(self, sequence: Sequence) -> None:
        """Release the noise of a sequence."""
        self._temperature_S[sequence.slot] = 0.0
        self._steps.pop(sequence.slot, None)

    def logprobs(self, sequence: Sequence) -> tuple[PositionLogprobs, ...]:
        """Return the log-probabilities at the rows of the newest ``choose``, if asked for.

        There can be more than tokens of the round.
        """
        steps = self._steps.get(sequence.slot)
        return () if steps is None else steps.logprobs

    @abstractmethod
    def fill(self, sequences: Rows[Sequence], num_proposed: Rows[int]) -> None:
        """Prepare the noise of the positions that the next round selects."""

    @abstractmethod
    def choose(
        self, sequences: Rows[Sequence], proposals: Rows[Proposal], logits_BPV: torch.Tensor
    ) -> list[list[TokenId]]:
        """Select the target's tokens of a round.

        Args:
            sequences: sequences of the round.
            proposals: proposal of each. Rows 0..len(proposal) of each sequence count.
            logits_BPV: float32.

        Returns:
            The tokens at the rows of each sequence. Verification reads them up to the first token
            that was not proposed. ``NO_TOKEN`` where the logits are not finite.
        """

    @abstractmethod
    def stored_noise(self, slots_R: Ints, positions_KR: Ints) -> StoredNoise | None:
        """Return the noise of prepared positions; None if it is computed with each choice."""

    @abstractmethod
    def choose_at(
        self, slots_B: Ints, positions_B: Ints, logits_BV: torch.Tensor, rows_A: Ints
    ) -> torch.Tensor:
        """Select one token of some slots, without a wait for the device of the logits.

        Args:
            slots_B: slots of the rows.
            positions_B: position of each token. Those of ``rows_A`` are prepared.
            logits_BV: float32. They may have fewer or more columns than those of the target: its
                vocabulary or that of the draft has more padding, whose logits are -inf.
            rows_A: rows whose tokens are read.

        Returns:
            int64 [B], on the device of the logits. Other rows are undefined. ``NO_TOKEN`` where the
            logits are not finite.
        """


class RingSampler(Sampler):
    """Selects the target's token at each of the P rows of a sequence. Step thread only.

    Noise is kept by (slot, position) and computed once: in ``fill``, while the drafts work, or in
    ``choose`` for the first token of a sequence. The steps of sampling parameters run at the rows
    that verification reads, one after another.
    """

    def __init__(self, engine: EngineConfig, vocab_size: int) -> None:
        super().__init__(engine, vocab_size)
        self._host_steps: dict[int, HostSteps] = {}
        """Steps by slot, of the sequences that have some."""
        # Rows of the round in progress, and of the next one.
        rows = 2 * engine.num_columns
        self._ring = NoiseRing(engine.max_num_seqs, rows, vocab_size, gumbel_by_torch)
        self._noise_YV = torch.from_numpy(self._ring.noise_YV)
        self._scores_V = np.empty(vocab_size, dtype=np.float32)

    def admit(self, sequence: Sequence) -> None:
        """See ``Sampler``."""
        super().admit(sequence)
        if (steps := self._steps.get(sequence.slot)) is not None:
            self._host_steps[sequence.slot] = HostSteps(steps, self._vocab_size)
        temperature = float(self._temperature_S[sequence.slot])
        self._ring.assign(sequence.slot, sequence.seed, sequence.choice, temperature)

    def release(self, sequence: Sequence) -> None:
        """See ``Sampler``."""
        super().release(sequence)
        self._host_steps.pop(sequence.slot, None)
        self._ring.release(sequence.slot)

    def fill(self, sequences: Rows[Sequence], num_proposed: Rows[int]) -> None:
        """Compute the noise of the positions that the next round selects, unless it is stored."""
        self._ring.fill_each(
            [sequence.slot for sequence in sequences],
            [len(sequence.tokens) for sequence in sequences],
            [num + 1 for num in num_proposed],
        )

    def choose(
        self, sequences: Rows[Sequence], proposals: Rows[Proposal], logits_BPV: torch.Tensor
    ) -> list[list[TokenId]]:
        """Select the tokens up to the first one that is not the proposed one; see ``Sampler``."""
        self.fill(sequences, [len(proposal) for proposal in proposals])
        rows = zip(sequences, proposals, logits_BPV, strict=True)
        return [self._choose_rows(*row) for row in rows]

    def stored_noise(self, slots_R: Ints, positions_KR: Ints) -> StoredNoise:
        """Return the noise of positions that are filled."""
        return StoredNoise(
            torch.from_numpy(self._temperature_S[slots_R]),
            self._noise_YV,
            self._ring.locate(np.broadcast_to(slots_R, positions_KR.shape), positions_KR),
        )

    def choose_at(
        self, slots_B: Ints, positions_B: Ints, logits_BV: torch.Tensor, rows_A: Ints
    ) -> torch.Tensor:
        """Select the tokens of ``rows_A``; the others are ``NO_TOKEN``. See ``Sampler``."""
        chosen_B = np.full(len(slots_B), NO_TOKEN)
        # The noise has the columns of the target. A draft may have more of them: padding.
        scores_BV = logits_BV[:, : self._vocab_size].numpy()
        slots, positions = slots_B.tolist(), positions_B.tolist()
        for row in rows_A.tolist():
            chosen_B[row] = self._choose(scores_BV[row], slots[row], positions[row])
        return torch.from_numpy(chosen_B)

    def _choose_rows(
        self, sequence: Sequence, proposed: Proposal, logits_PV: torch.Tensor
    ) -> list[TokenId]:
        """Return the tokens of the rows up to the first one that is not the proposed one."""
        steps = self._host_steps.get(sequence.slot)
        chosen: list[TokenId] = []
        rows_PV = logits_PV.numpy()
        for column in range(len(proposed) + 1):
            scores_V = rows_PV[column]
            if steps is not None:
                logits_1V = logits_PV[column : column + 1]
                scores_V = steps.scores(logits_1V, proposed[:column])[0].numpy()
            token = self._choose(scores_V, sequence.slot, len(sequence.tokens) + column)
            chosen.append(token)
            if column < len(proposed) and token != proposed[column]:
                break
        if steps is not None:
            steps.set_logprobs(logits_PV[: len(chosen)], torch.tensor(chosen))
        return chosen

    def _choose(self, logits_V: NDArray[np.float32], slot: int, position: int) -> TokenId:
        temperature = float(self._temperature_S[slot])
        return choose_row(logits_V, temperature, self._ring.row(slot, position), self._scores_V)


class KeyedSampler(Sampler):
    """Selects tokens where the logits are, with one read of the result. Step thread only.

    Log-probabilities need a second read in a round, for all sequences together. Other parameters
    need none.

    The tokens are those of ``RingSampler``: the noise has the same words, and values that agree to
    2e-6.
    """

    def __init__(
        self, engine: EngineConfig, vocab_size: int, ranks: SplitTarget | None = None
    ) -> None:
        """Construct; without ``ranks``, the device of the engine has all logits."""
        super().__init__(engine, vocab_size)
        self._device = engine.device
        self._device_steps = DeviceSteps(engine.max_num_seqs, vocab_size, engine.device)
        self._choose_of_keys = compiled_on(engine.device, choose_of_keys)
        self._ranks = ranks
        self._seeds_S = np.zeros(engine.max_num_seqs, dtype=np.uint64)
        self._choices_S = np.zeros(engine.max_num_seqs, dtype=np.int64)
        if ranks is not None:
            ranks.send_keys_of(self._keys)

    @torch.inference_mode()
    def warm_up(self, num_rows: int, vocab_sizes: Iterable[int]) -> None:
        """Choose rows with and without noise, so that no request waits for a compiler.

        One row and several rows are two functions, as are inference mode and its absence, and
        numbers of columns of which only some are multiples of 4.

        Args:
            num_rows: of a sequence in a round, at least 2.
            vocab_sizes: columns of the logits of the target and of a draft on its device.
        """
        for temperature, vocab_size in product((0.0, 1.0), vocab_sizes):
            self._temperature_S[0] = temperature
            for count in (1, num_rows):
                logits_RV = torch.zeros((count, vocab_size), device=self._device)
                zero_R = np.zeros(count, dtype=np.int64)
                self.choose_at(zero_R, zero_R, logits_RV, zero_R)
        self._temperature_S[0] = 0.0

    def admit(self, sequence: Sequence) -> None:
        """See ``Sampler``."""
        super().admit(sequence)
        self._device_steps.admit(sequence)
        self._seeds_S[sequence.slot] = sequence.seed
        self._choices_S[sequence.slot] = sequence.choice

    def fill(self, sequences: Rows[Sequence], num_proposed: Rows[int]) -> None:
        """Do nothing: the noise of a choice is computed with it."""

    def choose(
        self, sequences: Rows[Sequence], proposals: Rows[Proposal], logits_BPV: torch.Tensor
    ) -> list[list[TokenId]]:
        """Select the tokens at all rows, also of padding; see ``Sampler``."""
        slots_B = np.array([sequence.slot for sequence in sequences])
        next_B = np.array([len(sequence.tokens) for sequence in sequences])
        column_P = np.arange(logits_BPV.shape[1])
        slots_R = slots_B.repeat(len(column_P))
        positions_R = (next_B[:, None] + column_P).ravel()
        logits_RV = logits_BPV.flatten(0, 1)
        choose = self._choose_here if self._ranks is None else self._ranks.choose
        chosen_R = self._select(slots_R, positions_R, logits_RV, choose)
        parts = step_rows(map(self._steps.get, slots_B.tolist()), proposals) if self._steps else []
        if parts:
            rows_X = np.concatenate([part.index * len(column_P) + part.columns for part in parts])
            self._replace(chosen_R, parts, rows_X, logits_RV, (slots_R, positions_R))
        chosen: list[list[TokenId]] = chosen_R.cpu().view(logits_BPV.shape[:2]).tolist()
        return chosen

    def stored_noise(self, slots_R: Ints, positions_KR: Ints) -> None:
        """Return None: the noise of a choice is computed with it."""

    def choose_at(
        self,
        slots_B: Ints,
        positions_B: Ints,
        logits_BV: torch.Tensor,
        rows_A: Ints,  # noqa: ARG002 - a device needs no more time for all rows
    ) -> torch.Tensor:
        """Select a token of each row, from all logits of a model on this device."""
        return self._select(slots_B, positions_B, logits_BV, self._choose_here)

    def _replace(
        self,
        chosen_R: torch.Tensor,
        parts: Rows[StepRows],
        rows_X: Ints,
        logits_RV: torch.Tensor,
        addresses: tuple[Ints, Ints],
    ) -> None:
        """Replace the tokens of the sequences that have steps, at all rows that may be read."""
        slots_R, positions_R = addresses
        on_host_X = torch.from_numpy(rows_X)
        rows_on_device_X = to_device(on_host_X, self._device)
        if self._ranks is None:
            logits_XV = logits_RV[rows_on_device_X]
        else:
            logits_XV = self._ranks.gather(logits_RV, on_host_X)
        scores_XV = self._device_steps.scores(parts, logits_XV)
        chosen_X = self._select(slots_R[rows_X], positions_R[rows_X], scores_XV, self._choose_here)
        chosen_R[rows_on_device_X] = chosen_X
        self._device_steps.set_logprobs(parts, logits_XV, chosen_X)

    def _select(
        self, slots_R: Ints, positions_R: Ints, logits_RV: torch.Tensor, choose: Choose
    ) -> torch.Tensor:
        """Select one token of each row, with the noise of its slot and position."""
        is_warm = bool((self._temperature_S[slots_R] > 0).any())
        return choose(logits_RV, self._keys(slots_R, positions_R), is_warm=is_warm)

    def _keys(self, slots_R: Ints, positions_R: Ints) -> torch.Tensor:
        """Return the keys of the noise of slots and positions, [4, R]."""
        temperature_R = self._temperature_S[slots_R]
        return packed(self._seeds_S[slots_R], self._choices_S[slots_R], positions_R, temperature_R)

    def _choose_here(
        self, logits_RV: torch.Tensor, keys_4R: torch.Tensor, *, is_warm: bool
    ) -> torch.Tensor:
        keys = NoiseKeys.unpacked(to_device(keys_4R, self._device))
        return self._choose_of_keys(logits_RV, keys, is_warm=is_warm)

"""The steps of one sequence's sampling parameters, from logits to the scores that are compared.

The target computes them at each row as plain decoding would: row c of a round follows the committed
tokens and c proposed ones. Drafts compute none of them. ``HostSteps`` computes them on the CPU, row
by row; ``DeviceSteps`` on a device, for all sequences of a round.

Letters: I present tokens.
"""

from collections.abc import Sequence as Tokens
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from ssd.engine.sampling.logits import Filters, best_logprobs, filtered, penalized
from ssd.text.grammar import Words, packed_ids, unpacked_ids
from ssd.types import NO_TOKEN, PositionLogprobs, SamplingParams, TokenId, TokenLogprob
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


def has_steps(sampling: SamplingParams) -> bool:
    """Whether a request needs more than the token with the best sum of logit and noise."""
    return (
        has_penalties(sampling)
        or _has_filters(sampling)
        or bool(sampling.logit_bias)
        or sampling.min_tokens > 0
        or bool(sampling.json_schema or sampling.regex)
        or sampling.logprobs is not None
    )


def _has_filters(sampling: SamplingParams) -> bool:
    """Whether top-k, top-p or min-p can change a choice."""
    removes = sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
    return removes and sampling.temperature > 0.0


class LogitsSteps:
    """What the steps of one sequence need on any device. Step thread only."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self.sequence = sequence
        self.logprobs: tuple[PositionLogprobs, ...] = ()
        """Log-probabilities of the tokens of the newest round, if the request asks for them."""
        self.sampling = sequence.sampling
        self.has_filters = _has_filters(self.sampling)
        self.changes_logits = (
            has_penalties(self.sampling)
            or bool(self.sampling.logit_bias)
            or self.sampling.min_tokens > 0
            or sequence.grammar is not None
        )
        self.bias_ids_I = np.array([each for each, _ in self.sampling.logit_bias], dtype=np.int64)
        self.biases_I = np.array([bias for _, bias in self.sampling.logit_bias], dtype=np.float32)
        self.ending_ids = sorted(each for each in sequence.ending_ids if each < vocab_size)
        if sequence.grammar is not None:
            # A tokenizer can have more tokens than the logits have columns.
            num_ids = min(vocab_size, sequence.grammar.vocab_size)
            self._ids_W = packed_ids(np.arange(num_ids), num_ids)
            self._ends_W = packed_ids([each for each in self.ending_ids if each < num_ids], num_ids)

    def num_banned(self, first_column: int = 0) -> int:
        """Return after how many columns from this one on the text may end."""
        return max(0, self.sampling.min_tokens - self.sequence.num_emitted - first_column)

    def allowed(self, proposed: Tokens[TokenId], first_column: int, num_columns: int) -> Words:
        """Return which tokens the grammar allows, int32 [C, W]: a bit for each id.

        Ending tokens are not allowed at the first columns, unless the grammar allows nothing else.
        """
        grammar = self.sequence.grammar
        assert grammar is not None
        bits_CW = grammar.allowed(proposed, first_column, num_columns)
        bits_CW = bits_CW[:, : len(self._ids_W)] & self._ids_W
        num_banned = self.num_banned(first_column)
        longer_CW = bits_CW[:num_banned] & ~self._ends_W
        can_go_on_C = longer_CW.any(axis=1)
        bits_CW[:num_banned][can_go_on_C] = longer_CW[can_go_on_C]
        return bits_CW

    def set_logprobs(self, ids_CN: Tensor, logprobs_CN: Tensor) -> None:
        """Keep the log-probabilities of a round, up to the first row without a token.

        Args:
            ids_CN: of the chosen token, then of the most likely ones, on the CPU.
            logprobs_CN: theirs, as the model computed them.
        """
        rows = zip(ids_CN.tolist(), logprobs_CN.tolist(), strict=True)
        chosen = takewhile(lambda row: row[0][0] != NO_TOKEN, rows)
        positions = (tuple(map(TokenLogprob, *row)) for row in chosen)
        self.logprobs = tuple(PositionLogprobs(first, tuple(top)) for first, *top in positions)


class Penalties:
    """The penalties of one sequence on the CPU. Step thread only.

    Occurrences of tokens are counted once. A CPU reads and writes only the logits of present
    tokens: of a large vocabulary they are few. A device has one operation for all logits of all
    sequences instead; see ``DeviceSteps``. Both compute a logit with the same expression.
    """

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


class HostSteps:
    """The steps of one sequence on the CPU. Step thread only."""

    def __init__(self, steps: LogitsSteps, vocab_size: int) -> None:
        self._steps = steps
        sampling = steps.sampling
        self._penalties = Penalties(steps.sequence, vocab_size) if has_penalties(sampling) else None
        self._bias_ids_I = torch.from_numpy(steps.bias_ids_I)
        self._biases_I = torch.from_numpy(steps.biases_I)
        self._ending_ids_I = as_ids(steps.ending_ids)
        self._filters = row_filters([steps], [1], "cpu")

    def scores(self, logits_1V: Tensor, proposed: Tokens[TokenId]) -> Tensor:
        """Return the logits of one row after the steps, fp32 [1, V].

        -inf at the tokens that must not be chosen. A new tensor, or ``logits_1V`` if nothing
        changes.

        Args:
            logits_1V: fp32 [1, V].
            proposed: proposed tokens that the row follows, after the committed ones.
        """
        steps = self._steps
        row_1V = self._changed(logits_1V, proposed) if steps.changes_logits else logits_1V
        return filtered(row_1V, self._filters) if steps.has_filters else row_1V

    def set_logprobs(self, logits_CV: Tensor, chosen_C: Tensor) -> None:
        """Set the log-probabilities of the rows of a round, if the request asks for them."""
        count = self._steps.sampling.logprobs
        if count is not None:
            self._steps.set_logprobs(*best_logprobs(logits_CV, chosen_C, count))

    def _changed(self, logits_1V: Tensor, proposed: Tokens[TokenId]) -> Tensor:
        steps, row_1V = self._steps, logits_1V.clone()
        if self._penalties is not None:
            self._penalties.apply(row_1V[0], proposed)
        if steps.sampling.logit_bias:
            row_1V[0, self._bias_ids_I] += self._biases_I
        if steps.sequence.grammar is not None:
            bits_1W = steps.allowed(proposed, len(proposed), 1)
            # Logits can have more columns than the tokenizer has tokens.
            allowed_1V = unpacked_ids(bits_1W, row_1V.shape[1])
            row_1V.masked_fill_(~torch.from_numpy(allowed_1V), -torch.inf)
        elif steps.num_banned(len(proposed)):
            row_1V.index_fill_(1, self._ending_ids_I, -torch.inf)
        return row_1V


def row_filters(steps_of: Tokens[LogitsSteps], counts: Tokens[int], device: str) -> Filters:
    """Return the filters of several sequences, for ``counts`` rows of each."""
    default = SamplingParams()
    samplings = [steps.sampling if steps.has_filters else default for steps in steps_of]
    return Filters.on(
        device,
        np.array([each.temperature for each in samplings], dtype=np.float32).repeat(counts),
        np.array([each.top_k for each in samplings]).repeat(counts),
        np.array([each.top_p for each in samplings]).repeat(counts),
        np.array([each.min_p for each in samplings], dtype=np.float32).repeat(counts),
    )

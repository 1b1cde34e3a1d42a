"""The steps of one sequence's sampling parameters, from logits to the scores that are compared.

The target computes them at each row as plain decoding would: row c of a round follows the committed
tokens and c proposed ones. Drafts compute none of them.
"""

from collections.abc import Sequence as Tokens
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from ssd.engine.sampling.keyed import to_device
from ssd.engine.sampling.logits import Filters, best_logprobs
from ssd.types import NO_TOKEN, PositionLogprobs, SamplingParams, TokenId, TokenLogprob
from ssd_target.decoding.penalties import Penalties, has_penalties, ids_on
from ssd_target.decoding.sequence import Sequence


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
    """The steps of one sequence. Step thread only.

    ``apply`` has all of them but the filters, which a device runs for all sequences together.
    """

    def __init__(
        self, sequence: Sequence, vocab_size: int, device: str, penalties: type[Penalties]
    ) -> None:
        self._sequence = sequence
        self._vocab_size = vocab_size
        self._device = device
        self.logprobs: tuple[PositionLogprobs, ...] = ()
        """Log-probabilities of the tokens of the newest round, if the request asks for them."""
        sampling = sequence.sampling
        self.sampling = sampling
        self._penalties = (
            penalties(sequence, vocab_size, device) if has_penalties(sampling) else None
        )
        self._changes_logits = (
            self._penalties is not None
            or bool(sampling.logit_bias)
            or sampling.min_tokens > 0
            or sequence.grammar is not None
        )
        self._bias_ids_I = self._ids([token_id for token_id, _ in sampling.logit_bias])
        biases = torch.tensor([bias for _, bias in sampling.logit_bias], dtype=torch.float32)
        self._biases_I = to_device(biases, device)
        self.has_filters = _has_filters(sampling)
        self.filters = _filters_1(sampling, device)
        """Filters of one row."""
        self._ending_ids = sorted(
            token_id for token_id in sequence.ending_ids if token_id < vocab_size
        )
        self._ending_ids_I = self._ids(self._ending_ids)

    def apply(self, logits_CV: Tensor, proposed: Tokens[TokenId], first_column: int = 0) -> Tensor:
        """Return the logits of some consecutive columns after the steps.

        Args:
            logits_CV: fp32 [C, V], of the columns from ``first_column`` on.
            proposed: tokens that the columns of the round follow; column c follows c of them.
            first_column: 0 is the column after the committed tokens.

        Returns:
            fp32 [C, V], -inf at the tokens that a column must not choose: a new tensor, or
            ``logits_CV`` if no step changes logits.
        """
        sampling = self.sampling
        if not self._changes_logits:
            return logits_CV
        rows_CV = logits_CV.clone()
        if self._penalties is not None:
            rows_CV = self._penalties.apply(rows_CV, proposed, first_column)
        if sampling.logit_bias:
            rows_CV[:, self._bias_ids_I] += self._biases_I
        num_banned = max(0, sampling.min_tokens - self._sequence.num_emitted - first_column)
        if self._sequence.grammar is not None:
            allowed_CV = self._allowed(len(rows_CV), proposed, first_column, num_banned)
            # Logits can have more columns than the tokenizer has tokens.
            rows_CV[:, allowed_CV.shape[1] :] = -torch.inf
            rows_CV[:, : allowed_CV.shape[1]].masked_fill_(~allowed_CV, -torch.inf)
        elif num_banned:
            # A number as the value of an index would be copied to the device, which waits for it.
            rows_CV[:num_banned].index_fill_(1, self._ending_ids_I, -torch.inf)
        return rows_CV

    def _allowed(
        self, num_columns: int, proposed: Tokens[TokenId], first_column: int, num_banned: int
    ) -> Tensor:
        """Return which tokens the grammar allows; not the ending ones at the first columns.

        Where the grammar allows nothing else, it allows ending tokens at any column.
        """
        grammar = self._sequence.grammar
        assert grammar is not None
        # A tokenizer can have more tokens than the logits have columns.
        allowed_CV = grammar.allowed(proposed, first_column, num_columns)[:, : self._vocab_size]
        longer_CV = allowed_CV[:num_banned].copy()
        num_ids = allowed_CV.shape[1]
        longer_CV[:, [token_id for token_id in self._ending_ids if token_id < num_ids]] = False
        can_go_on_C = longer_CV.any(axis=1)
        allowed_CV[:num_banned][can_go_on_C] = longer_CV[can_go_on_C]
        return to_device(torch.from_numpy(allowed_CV), self._device)

    def logprobs_of(self, logits_CV: Tensor, chosen_C: Tensor) -> Tensor:
        """Return what ``set_logprobs`` reads, on the device: float64 [2, C, N].

        Args:
            logits_CV: as the model computed them.
            chosen_C: token of each row.

        Returns:
            Ids and log-probabilities, both exact in float64: of the chosen token, then of the most
            likely ones that the request asks for.
        """
        assert self.sampling.logprobs is not None
        valid_C = chosen_C.clamp(min=0)
        ids_CN, logprobs_CN = best_logprobs(logits_CV, valid_C, self.sampling.logprobs)
        ids_CN[:, 0] = chosen_C
        return torch.stack((ids_CN.double(), logprobs_CN.double()))

    def set_logprobs(self, logprobs_2CN: Tensor) -> None:
        """Keep the log-probabilities of a round, up to the first row without a token.

        Args:
            logprobs_2CN: result of ``logprobs_of``, on the CPU.
        """
        ids_CN, logprobs_CN = logprobs_2CN[0].long().tolist(), logprobs_2CN[1].tolist()
        rows = zip(ids_CN, logprobs_CN, strict=True)
        chosen = takewhile(lambda row: row[0][0] != NO_TOKEN, rows)
        positions = (tuple(map(TokenLogprob, *row)) for row in chosen)
        self.logprobs = tuple(PositionLogprobs(first, tuple(top)) for first, *top in positions)

    def _ids(self, token_ids: Tokens[int]) -> Tensor:
        return ids_on(self._device, token_ids)


def _filters_1(sampling: SamplingParams, device: str) -> Filters:
    if not _has_filters(sampling):
        sampling = SamplingParams()
    return Filters.on(
        device,
        np.array([sampling.temperature], dtype=np.float32),
        np.array([sampling.top_k]),
        np.array([sampling.top_p]),
        np.array([sampling.min_p], dtype=np.float32),
    )

"""Predicts the speed of plain, synchronous and speculative decoding from times and rates.

All values are means over rounds. A round of a batch serves all its sequences. With hit rate p of a
sequence and b sequences, all of which wait for a late proposal, p^b is the probability of a round
without a wait (Cor 8 and Thm 17 of the paper).

Source: arXiv 2603.03251, Thm 7, Cor 8, Cor 16, Thm 17.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTimes:
    """Times of a pair at one batch size, in seconds."""

    plain: float
    """Forward pass of the target with one row a sequence."""
    verify: float
    """Forward pass of the target with K+1 rows a sequence."""
    proposal: float
    """Proposals of the draft without a table: K steps with one row a sequence."""
    table: float
    """From a commit to the table: K steps with N rows a sequence, and the draft's own work."""
    overhead: float
    """Work of a round beside the passes, which nothing hides: host and transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How well a draft predicts a target."""

    tokens_after_draft: float
    """Tokens of a round whose proposal the draft made (E)."""
    hit_rate: float
    tokens_after_miss: float
    """Tokens of a round after a miss."""
    waits_after_miss: bool
    """After a miss, the draft makes a proposal while the round waits. Only the published engine
    does this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Predicted speed of one mode."""

    tokens_per_second: float
    """Sum over the batch."""
    round_seconds: float
    tokens_per_round: float
    """Tokens of a sequence."""
    efficiency: float
    """Verify divided by round."""


def tokens_per_round(acceptance: float, lookahead: int) -> float:
    """Return the expected tokens of a round: 1 + a + a^2 + ... + a^K.

    Args:
        acceptance: probability that a proposed token is accepted if all before it are, 0..1.
        lookahead: tokens of the proposal (K).
    """
    return sum(acceptance**length for length in range(lookahead + 1))


def plain_speed(times: PairTimes, num_sequences: int) -> Speed:
    """Predict plain decoding."""
    return _speed(times.plain, times.plain + times.overhead, 1.0, num_sequences)


def synchronous_speed(times: PairTimes, rates: Rates, num_sequences: int) -> Speed:
    """Predict a draft on the device of the target: a proposal, then its verify."""
    seconds = times.proposal + times.verify + times.overhead
    return _speed(times.verify, seconds, rates.tokens_after_draft, num_sequences)


def speculative_speed(times: PairTimes, rates: Rates, num_sequences: int) -> Speed:
    """Predict a draft on its own device.

    After a hit, a round takes as long as the verify or the table. After a miss, it takes as long as
    the verify and, if it waits, a proposal.
    """
    p = rates.hit_rate
    tokens = p * rates.tokens_after_draft + (1 - p) * rates.tokens_after_miss
    after_hit = max(times.verify, times.table)
    if rates.waits_after_miss:
        p_all = p**num_sequences
        after_miss = times.verify + times.proposal
        seconds = p_all * after_hit + (1 - p_all) * max(after_hit, after_miss)
    else:
        seconds = after_hit
    return _speed(times.verify, seconds + times.overhead, tokens, num_sequences)


def _speed(verify: float, seconds: float, tokens: float, num_sequences: int) -> Speed:
    return Speed(
        tokens_per_second=num_sequences * tokens / seconds,
        round_seconds=seconds,
        tokens_per_round=tokens,
        efficiency=verify / seconds,
    )

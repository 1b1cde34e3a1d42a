"""The length of proposals: from the calibration at first, then from the rounds."""

from ssd.speculation.estimates import Calibration
from ssd.speculation.proposal_length import CHOICE_ROUNDS, FORGET_ROUNDS, ProposalLength
from ssd.speculation.round_record import RoundRecord

LOOKAHEAD = 6
COLUMNS = tuple(range(1, LOOKAHEAD + 2))
SIZES = (1, 2, 4, 8)


def calibration(fixed: float, each: float) -> Calibration:
    """Of a verify that takes ``fixed`` and ``each`` row."""
    return Calibration({(c, size): fixed + each * c * size for c in COLUMNS for size in SIZES})


STEEP = calibration(0.04, 0.0012)
"""Float32 on a CPU: 56 rows take twice as long as eight."""
FLAT = calibration(0.04, 0.00005)


def rounds(
    length: ProposalLength,
    times: Calibration,
    accepted: tuple[int, ...],
    count: int,
    *,
    columns: int = LOOKAHEAD,
    wait_seconds: float = 0.0,
) -> None:
    """Add rounds in which each sequence has accepted so many of its tokens.

    Tables have so many columns. Rounds wait for so long if the largest length is K.
    """
    for _ in range(count):
        largest = length.largest(len(accepted))
        proposed = min(largest, columns)
        record = RoundRecord(num_auto=len(accepted))
        for each in accepted:
            record.add_outcome(proposed, min(each, proposed), min(each, proposed) + 1)
        record.verify_seconds = times.verify_seconds(1 + proposed, len(accepted))
        record.wait_seconds = wait_seconds * (largest == LOOKAHEAD)
        record.seconds = record.verify_seconds + record.wait_seconds + 0.002
        length.add_round(record, None)


def test_the_first_length_is_shorter_where_rows_of_a_large_batch_cost_more_than_they_save() -> None:
    length = ProposalLength(COLUMNS, LOOKAHEAD, STEEP)
    assert length.largest(1) == LOOKAHEAD
    assert length.largest(8) in {2, 3, 4}


def test_where_rows_are_free_or_times_unknown_the_first_proposals_are_full() -> None:
    for times in (FLAT, Calibration()):
        length = ProposalLength(COLUMNS, LOOKAHEAD, times)
        assert {length.largest(size) for size in SIZES} == {LOOKAHEAD}


def test_the_length_follows_the_acceptance() -> None:
    good, bad = (ProposalLength(COLUMNS, LOOKAHEAD, STEEP) for _ in range(2))
    first = good.largest(8)
    rounds(good, STEEP, (LOOKAHEAD,) * 8, 4 * CHOICE_ROUNDS)
    rounds(bad, STEEP, (0, 0, 0, 1) * 2, 4 * CHOICE_ROUNDS)
    assert good.largest(8) > first
    assert bad.largest(8) == 1


def test_another_number_of_sequences_starts_with_the_acceptance_of_the_nearest() -> None:
    length = ProposalLength(COLUMNS, LOOKAHEAD, STEEP)
    rounds(length, STEEP, (0, 0, 0, 1), 6 * CHOICE_ROUNDS)
    assert length.largest(4) == 1
    assert length.largest(8) == 1


def test_short_tables_do_not_make_the_length_shorter() -> None:
    length = ProposalLength(COLUMNS, LOOKAHEAD, FLAT)
    rounds(length, FLAT, (LOOKAHEAD,), 20 * CHOICE_ROUNDS, columns=3)
    assert length.largest(1) == LOOKAHEAD


def test_waits_for_long_tables_make_the_length_shorter() -> None:
    in_time, late = (ProposalLength(COLUMNS, LOOKAHEAD, FLAT) for _ in range(2))
    rounds(in_time, FLAT, (0, 1, 2, 2), 20 * CHOICE_ROUNDS)
    rounds(late, FLAT, (0, 1, 2, 2), 20 * CHOICE_ROUNDS, wait_seconds=0.04)
    assert late.largest(4) < in_time.largest(4)


def test_waits_of_the_start_do_not_shorten_proposals_for_ever() -> None:
    length = ProposalLength(COLUMNS, LOOKAHEAD, FLAT)
    rounds(length, FLAT, (1, 2, 3, 6), 4 * CHOICE_ROUNDS, wait_seconds=0.04)
    assert length.largest(4) < LOOKAHEAD
    rounds(length, FLAT, (1, 2, 3, 6), 2 * FORGET_ROUNDS)
    assert length.largest(4) == LOOKAHEAD


def test_waits_of_rounds_that_store_a_prompt_do_not_count() -> None:
    length = ProposalLength(COLUMNS, LOOKAHEAD, FLAT)
    for _ in range(6 * CHOICE_ROUNDS):
        rounds(length, FLAT, (LOOKAHEAD,), 1)
        slow = RoundRecord(num_auto=1, prompt_tokens=16, verify_seconds=0.02, wait_seconds=1.0)
        slow.seconds = 1.1
        slow.add_outcome(LOOKAHEAD, LOOKAHEAD, LOOKAHEAD + 1)
        length.add_round(slow, None)
    assert length.largest(1) == LOOKAHEAD


def test_a_verify_with_padding_measures_no_number_of_columns() -> None:
    times = calibration(0.02, 0.001)
    length = ProposalLength(COLUMNS, LOOKAHEAD, times)
    assert length.largest(1) == LOOKAHEAD
    for _ in range(6 * CHOICE_ROUNDS):
        rounds(length, times, (2,), 1)
        padded = RoundRecord(num_auto=1, num_padding=3, verify_seconds=0.044, seconds=0.046)
        padded.add_outcome(3, 2, 3)
        length.add_round(padded, None)
    assert length.largest(1) in {2, 3}


def test_without_a_calibration_lengths_need_the_time_of_plain_decoding() -> None:
    length = ProposalLength(COLUMNS, LOOKAHEAD, Calibration())
    rounds(length, STEEP, (0, 1) * 4, 4 * CHOICE_ROUNDS)
    assert length.largest(8) == LOOKAHEAD


def test_a_short_length_grows_again_when_the_text_changes() -> None:
    length = ProposalLength(COLUMNS, LOOKAHEAD, STEEP)
    rounds(length, STEEP, (0, 1) * 4, 200)
    rounds(length, STEEP, (0, 0, 0, 1) * 2, 200)
    assert length.largest(8) == 1
    rounds(length, STEEP, (6,) * 8, 2 * FORGET_ROUNDS)
    assert length.largest(8) >= LOOKAHEAD - 1


def test_a_length_that_was_slow_for_a_while_is_tried_again() -> None:
    slow = {(c, size): seconds + 0.5 * (c > 3) for (c, size), seconds in STEEP.seconds.items()}
    length = ProposalLength(COLUMNS, LOOKAHEAD, STEEP)
    rounds(length, STEEP, (1,) * 8, 100)
    rounds(length, Calibration(slow), (6,) * 8, 2 * FORGET_ROUNDS)
    assert length.largest(8) <= 2
    rounds(length, STEEP, (6,) * 8, 2 * FORGET_ROUNDS)
    assert length.largest(8) >= LOOKAHEAD - 1


def test_a_difficult_text_after_many_good_ones_does_not_keep_proposals_short_for_long() -> None:
    """The trials of longer proposals have become rare by then."""
    length = ProposalLength(COLUMNS, LOOKAHEAD, STEEP)
    rounds(length, STEEP, (4,) * 8, 20 * FORGET_ROUNDS)
    assert 1 < length.largest(8) < LOOKAHEAD
    rounds(length, STEEP, (0, 0, 0, 1) * 2, 200)
    assert length.largest(8) == 1
    rounds(length, STEEP, (6,) * 8, 2 * FORGET_ROUNDS)
    assert length.largest(8) >= LOOKAHEAD - 1

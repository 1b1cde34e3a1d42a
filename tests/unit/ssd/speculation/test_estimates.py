import pytest

from ssd.speculation.estimates import Calibration, PassTimes
from ssd.speculation.round_record import RoundRecord


def round_of(num_sequences: int, seconds: float) -> RoundRecord:
    return RoundRecord(num_sequences=num_sequences, verify_seconds=seconds, prefill_seconds=0.5)


@pytest.mark.parametrize(
    ("num_sequences", "verify"),
    # Twice the calibrated time near one row, and 1.25 times near eight rows.
    [(1, 2.0), (8, 5.0), (16, 10.0)],
)
def test_a_verify_takes_as_long_as_others_of_its_rows_and_the_rest_is_prefill(
    num_sequences: int, verify: float
) -> None:
    subject = PassTimes(Calibration({(1, 1): 1.0, (1, 8): 4.0}))
    for sequences, seconds in ((1, 1.0), (1, 3.0), (8, 5.0)):
        subject.add_round(round_of(sequences, seconds))
    record = round_of(num_sequences, 20.0)
    subject.divide(record)
    assert record.verify_seconds == verify
    assert record.prefill_seconds == 0.5 + 20.0 - verify


def test_before_a_measurement_the_calibration_is_the_time_of_a_verify() -> None:
    record = round_of(1, 9.0)
    PassTimes(Calibration({(1, 1): 1.0})).divide(record)
    assert (record.verify_seconds, record.prefill_seconds) == (1.0, 8.5)


def test_a_fast_verify_with_prompts_has_no_negative_prefill() -> None:
    record = round_of(1, 0.25)
    PassTimes(Calibration({(1, 1): 1.0})).divide(record)
    assert (record.verify_seconds, record.prefill_seconds) == (0.25, 0.5)

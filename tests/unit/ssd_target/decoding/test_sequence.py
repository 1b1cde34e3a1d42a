"""The end of a sequence."""

import pytest
from tests.sequences import make_sequence

from ssd.types import FinishReason, SamplingParams, TokenId
from ssd_target.decoding.sequence import Sequence, StopDetector

END = 0


class StopsAt:
    def __init__(self, token_id: TokenId) -> None:
        self.token_id = token_id
        self.seen: list[TokenId] = []

    def completes(self, token_id: TokenId) -> bool:
        self.seen.append(token_id)
        return token_id == self.token_id


def sequence(sampling: SamplingParams, *detectors: StopDetector) -> Sequence:
    ends = frozenset({END})
    return make_sequence((5, 6, 7), sampling, eos_token_ids=ends, stop_detectors=detectors)


def test_ignore_eos_continues_after_end_of_text() -> None:
    subject = sequence(SamplingParams(ignore_eos=True))
    assert subject.append([8, END, 9]) == (8, END, 9)
    assert subject.finish_reason is None


def test_ignore_eos_does_not_ignore_stop_tokens() -> None:
    subject = sequence(SamplingParams(ignore_eos=True, stop_token_ids=(9,)))
    assert subject.append([8, END, 9, 4]) == (8, END, 9)


def test_the_limit_truncates_a_proposal() -> None:
    subject = sequence(SamplingParams(max_tokens=3))
    subject.append([1, 2])
    assert (subject.finish_reason, subject.num_remaining) == (None, 1)
    assert subject.append([3, 4]) == (3,)
    assert subject.finish_reason is FinishReason.LENGTH


def test_a_stop_token_at_the_limit_gives_finish_reason_stop() -> None:
    subject = sequence(SamplingParams(max_tokens=2))
    subject.append([1, END])
    assert subject.finish_reason is FinishReason.STOP


def test_the_stop_detector_receives_each_emitted_token_once() -> None:
    detector = StopsAt(9)
    subject = sequence(SamplingParams(), detector)
    subject.append([1, 2])
    assert subject.append([3, 9, 4]) == (3, 9)
    assert detector.seen == [1, 2, 3, 9]


@pytest.mark.parametrize("size", [1, 2, 3, 10])
def test_the_tokens_do_not_depend_on_the_number_of_tokens_per_round(size: int) -> None:
    text = [1, 2, 3, 4, END, 6, 7, 8, 9, 10]
    subject = sequence(SamplingParams())
    emitted: list[TokenId] = []
    for start in range(0, len(text), size):
        if subject.finish_reason is None:
            emitted += subject.append(text[start : start + size])
    assert emitted == [1, 2, 3, 4, END]


@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [
        (SamplingParams(temperature=0.8, top_k=2, top_p=0.1, min_p=0.9), 0.8),
        (SamplingParams(temperature=0.8, top_k=1), 0.0),
        (SamplingParams(temperature=0.8, top_p=0.0), 0.0),
        (SamplingParams(temperature=0.8, min_p=1.0), 0.0),
    ],
)
def test_a_draft_adds_no_noise_if_a_filter_keeps_one_token(
    sampling: SamplingParams, temperature: float
) -> None:
    assert sequence(sampling).opening().temperature == temperature

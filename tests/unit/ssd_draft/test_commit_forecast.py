"""When the next commit of a target is expected."""

from ssd_draft.commit_forecast import CommitForecast


def forecast(*arrivals: float, waited: float = 0.0) -> float:
    found = CommitForecast()
    for arrived_at in arrivals:
        found.add_commits(arrived_at, waited, is_plain=False)
    return found.seconds


def test_a_commit_is_expected_at_any_time_before_there_are_two() -> None:
    assert forecast() == forecast(1.0) == 0.0


def test_commits_are_expected_at_the_interval_of_the_recent_ones() -> None:
    assert forecast(1.0, 2.0) == 1.0
    assert forecast(*range(20), *(19 + each / 2 for each in range(1, 9))) == 0.5


def test_the_time_for_which_a_round_waited_is_not_part_of_the_interval() -> None:
    assert forecast(1.0, 2.0, 3.0, waited=0.25) == 0.75
    assert forecast(1.0, 2.0, waited=5.0) == 0.0


def test_a_pause_does_not_change_the_interval() -> None:
    assert forecast(1.0, 2.0, 60.0, 61.0, 62.0) == 1.0


def test_most_commits_come_no_earlier_than_expected() -> None:
    intervals = [1.0, 1.2, 0.3, 1.1, 1.3, 0.9, 1.0, 1.4]
    arrivals = [sum(intervals[:count]) for count in range(len(intervals) + 1)]
    assert 0.9 <= forecast(*arrivals) <= 1.001


def test_rounds_with_proposals_and_without_have_their_own_intervals() -> None:
    found = CommitForecast()
    for turn in range(8):
        found.add_commits(6.0 * turn, 0.0, is_plain=True)
        found.add_commits(6.0 * turn + 2.0, 0.0, is_plain=False)
    assert found.seconds == 4.0
    found.add_commits(48.0, 0.0, is_plain=True)
    assert found.seconds == 2.0


def test_a_round_without_proposals_is_expected_to_take_no_longer_than_one_with() -> None:
    found = CommitForecast()
    for arrived_at, is_plain in ((0.0, True), (4.0, False), (5.0, True)):
        found.add_commits(arrived_at, 0.0, is_plain=is_plain)
    assert found.seconds == 1.0

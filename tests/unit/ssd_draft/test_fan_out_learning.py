"""The fit of the fan-out in a draft: rounds of its sessions, metrics, and a restart."""

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from tests.unit.ssd.speculation.test_fan_out_fit import N, synthetic_rounds
from tests.unit.ssd_draft.ledger_draft import Opened

from ssd.observability.metrics import FAN_OUT_ROUNDS, FAN_OUT_VALUE
from ssd.speculation.fan_out import START_VALUES, Candidates
from ssd.speculation.fan_out_fit import BATCH_ROUNDS, Rounds
from ssd_draft.fan_out_learning import ROUNDS_BETWEEN_FILES, FanOutLearning


def chosen(learning: FanOutLearning) -> list[tuple[int, int]]:
    """A table of one round."""
    rounds = synthetic_rounds(1, seed=7)
    candidates = Candidates(rounds.ids_BPM, rounds.scores_BPM, rounds.temperature_B)
    table = learning.policy_of("adaptive").choose(
        candidates, rounds.proposal_BK, rounds.num_proposed_B, N
    )
    return list(zip(table.accepted_BN[0].tolist(), table.bonus_BN[0].tolist(), strict=True))


def learned(folder: Path | str, weights: str = "sha256:1", num_branches: int = N) -> FanOutLearning:
    learning = FanOutLearning(num_branches, str(folder), weights)
    learning.load()
    return learning


def teach(learning: FanOutLearning, num_rounds: int = 320) -> None:
    rounds = synthetic_rounds(num_rounds)
    for first in range(0, num_rounds, BATCH_ROUNDS):
        learning.add(Rounds(*(each[first : first + BATCH_ROUNDS] for each in rounds.arrays)))
        assert learning.learn()


def test_a_restarted_draft_selects_the_same_outcomes(tmp_path: Path) -> None:
    first = learned(tmp_path / "new" / "folder")
    assert chosen(first) == chosen(learned(""))
    teach(first)
    assert chosen(first) != chosen(learned(""))
    first.save()
    assert chosen(learned(tmp_path / "new" / "folder")) == chosen(first)
    assert [each.name for each in (tmp_path / "new" / "folder").iterdir()] == ["fan_out.json"]


def test_the_file_is_written_while_the_draft_serves(tmp_path: Path) -> None:
    learning = learned(tmp_path)
    teach(learning, ROUNDS_BETWEEN_FILES)
    assert chosen(learned(tmp_path)) == chosen(learning)


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    learning = learned("")
    teach(learning)
    learning.save()
    assert not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_read_gives_the_start_values() -> None:
    assert chosen(learned("/" + "a" * 300)) == chosen(learned(""))


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "[" * 100_000, '{"weights": "sha256:1", "branches": 8}']
)
def test_a_broken_file_gives_the_start_values_and_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "fan_out.json").write_text(text)
    learning = learned(tmp_path)
    assert chosen(learning) == chosen(learned(""))
    teach(learning)
    learning.save()
    assert chosen(learned(tmp_path)) == chosen(learning)


def test_values_of_other_weights_or_branches_are_not_used(tmp_path: Path) -> None:
    learning = learned(tmp_path)
    teach(learning)
    learning.save()
    for other in (learned(tmp_path, "sha256:2"), learned(tmp_path, num_branches=N + 1)):
        assert chosen(other) == chosen(learned(""))


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    learning = learned(tmp_path / "file" / "folder")
    teach(learning)
    learning.save()


def test_a_named_pipe_in_place_of_the_file_is_not_waited_for_and_is_replaced(
    tmp_path: Path,
) -> None:
    os.mkfifo(tmp_path / "fan_out.json")
    os.mkfifo(tmp_path / f"fan_out.{os.getpid()}")
    learning = learned(tmp_path)
    assert chosen(learning) == chosen(learned(""))
    teach(learning)
    learning.save()
    assert chosen(learned(tmp_path)) == chosen(learning)


def test_a_full_disk_keeps_the_last_file_and_no_part_of_a_new_one(tmp_path: Path) -> None:
    learning = learned(tmp_path)
    teach(learning)
    learning.save()
    before = chosen(learning)
    teach(learning)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A write fails after these bytes, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        learning.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in tmp_path.iterdir()] == ["fan_out.json"]
    assert chosen(learned(tmp_path)) == before


def test_metrics_show_the_values_in_use_and_the_rounds_behind_them() -> None:
    teach(learned(""))
    band = "above 0.75"
    assert FAN_OUT_ROUNDS.labels(temperature=band)._value.get() == 320
    gap = FAN_OUT_VALUE.labels(temperature=band, value="gap")._value.get()
    assert gap != START_VALUES[0]
    assert FAN_OUT_VALUE.labels(temperature="0", value="gap")._value.get() == START_VALUES[0]


def test_each_commit_of_a_session_is_a_round_of_the_fit(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, link, text = opened
    seen: list[Rounds] = []
    monkeypatch.setattr(draft.learning, "add", seen.append)
    for accepted in (0, 1, 0):
        num_proposed = len(text.proposal)
        commit = text.hit(link.newest(), min(accepted, num_proposed), 2)
        draft.apply(link, commit)
        (rounds,) = seen
        seen.clear()
        assert rounds.num_proposed_B.tolist() == [num_proposed]
        assert rounds.accepted_B.tolist() == [commit.outcome.accepted]
        assert rounds.bonus_B.tolist() == [commit.outcome.bonus]
        assert rounds.temperature_B.tolist() == [np.float32(text.temperature)]

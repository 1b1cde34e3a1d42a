"""The comparison of the two texts of the demo."""

import pytest

from ssd.rpc.pool_codec import LinkStatus
from ssd.types import FinishReason, Mode, SpeculationStatistics
from ssd_cli import demo
from ssd_cli.demo import NotSpeculativeError
from ssd_cli.figures import Generation, figures

LINK = LinkStatus(address="127.0.0.1:7", state="active")
LOST = LinkStatus(address="127.0.0.1:7", state="lost", reason="no heartbeat")


def text(
    hits: int = 0, misses: int = 0, late: int = 0, paused: int = 0, backup: int = 0
) -> Generation:
    statistics = SpeculationStatistics(
        mode=Mode.AUTO if hits + misses + late + paused + backup else Mode.AUTOREGRESSIVE,
        rounds=40,
        hits=hits,
        misses=misses,
        late=late,
        paused_rounds=paused,
        backup_rounds=backup,
        decode_seconds=2.0,
    )
    found = figures(40, 7, statistics)
    return Generation(
        text="x", token_ids=tuple(range(40)), finish_reason=FinishReason.LENGTH, figures=found
    )


@pytest.mark.parametrize(
    ("ahead", "links", "reason"),
    [
        (text(), [], "no draft is linked"),
        (text(), [LOST], "no draft is in use: 127.0.0.1:7 is lost (no heartbeat)"),
        (text(), [LINK], "the draft is linked, but the text ended before its session"),
        (text(late=30, misses=3), [LINK], "30 of 33 tables were late: the draft is slower"),
        (text(misses=3), [LINK], "none of 3 tables contained the outcome"),
        (text(late=20, paused=20), [LINK], "20 of 20 tables were late"),
        (text(backup=9, paused=20), [LINK], "n-grams proposed in 9 rounds, and none was accepted"),
    ],
)
def test_a_text_without_a_hit_reports_the_cause_and_no_ratio(
    ahead: Generation, links: list[LinkStatus], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotSpeculativeError) as raised:
        demo._compare(text(), ahead, links)
    assert str(raised.value).startswith(f"no round of the SSD text was speculative: {reason}")
    assert "as fast as AR" not in capsys.readouterr().out


def test_a_target_that_turned_speculation_off_is_no_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    demo._compare(text(), text(paused=40), [LINK])
    printed = " ".join(capsys.readouterr().out.split())
    assert "SSD decoded as AR: the target had turned speculation off" in printed
    assert "as fast as AR" not in printed


def test_a_text_with_one_hit_reports_a_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    demo._compare(text(), text(hits=1, late=30), [LINK])
    assert "SSD is 1.00x as fast as AR on this machine" in capsys.readouterr().out


def test_the_ratio_is_a_median_with_its_range(capsys: pytest.CaptureFixture[str]) -> None:
    demo._compare(text(), text(hits=1), [LINK], [2.5, 19.0, 2.4, 2.6])
    printed = " ".join(capsys.readouterr().out.split())
    assert "SSD is 2.50x as fast as AR on this machine (median of 5 runs, 1.00 to 19.00)" in printed

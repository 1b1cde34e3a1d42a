"""The result of ``ssd check``."""

import json
from dataclasses import replace

import pytest

from ssd_cli.check import CheckResult, report_check
from ssd_cli.demo import DifferentTextError, NotSpeculativeError

EQUAL = CheckResult(
    num_texts=2, num_tokens=48, dtype="bfloat16", accepted_tokens=30, first_differences=(None, None)
)


def test_equal_texts_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    report_check(EQUAL, is_json=False)
    assert "identical: 2 of 2 texts" in capsys.readouterr().out


@pytest.mark.parametrize("is_json", [False, True])
def test_a_different_text_is_an_error_that_names_the_token(
    capsys: pytest.CaptureFixture[str], *, is_json: bool
) -> None:
    with pytest.raises(DifferentTextError, match=r"1 of 2 texts are identical.*\(None, 17\)"):
        report_check(replace(EQUAL, first_differences=(None, 17)), is_json=is_json)
    printed = capsys.readouterr().out
    assert (json.loads(printed)["num_equal"] == 1) if is_json else not printed


def test_texts_without_an_accepted_token_prove_nothing() -> None:
    with pytest.raises(NotSpeculativeError, match="nothing was compared"):
        report_check(replace(EQUAL, accepted_tokens=0), is_json=False)

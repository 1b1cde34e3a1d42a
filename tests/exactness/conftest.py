"""The exactness suite's report: a table of all cells that ran, printed at the end."""

import pytest
from tests.exactness.cells import ROW, Report, Row


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    return Report(request.node.user_properties)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = [
        Row(**value)
        for result in ("passed", "failed")
        for test in terminalreporter.getreports(result)
        for name, value in test.user_properties
        if name == ROW
    ]
    if not rows:
        return
    terminalreporter.section("exactness: speculative against plain decoding, fp32")
    terminalreporter.write_line(
        f"{'draft':<22} {'K':>2} {'T':>4} {'prompts':>7} {'tokens':>7} {'different':>9} "
        f"{'hit rate':>8} {'late':>5} {'tokens per round':>16} {'accepted':>8}"
    )
    for row in sorted(rows, key=lambda row: (row.draft, row.lookahead, row.temperature)):
        rate = f"{row.hits / row.looked_up:.2f}" if row.looked_up else "-"
        kept = row.num_proposed - row.num_rejected
        accepted = f"{kept / row.num_proposed:.2f}" if row.num_proposed else "-"
        terminalreporter.write_line(
            f"{row.draft:<22} {row.lookahead:>2} {row.temperature:>4} {row.num_prompts:>7} "
            f"{row.num_tokens:>7} {row.num_different:>9} {rate:>8} {row.late:>5} "
            f"{row.tokens_per_round:>16.2f} {accepted:>8}"
        )

"""The exactness suite's shared parts: cells, prompts, and the table that is printed at the end."""

from dataclasses import dataclass, field

import pytest

from ssd.demo.corpus import held_out_prompts

NUM_PROMPTS = 24


@dataclass(frozen=True)
class Row:
    """One cell that was compared with plain decoding."""

    draft: str
    lookahead: int
    temperature: float
    num_prompts: int
    num_tokens: int
    num_different: int
    hits: int
    looked_up: int
    late: int
    tokens_per_round: float
    num_proposed: int
    num_rejected: int
    """Proposed tokens that were not accepted."""


@dataclass
class Report:
    """Rows of all cells that ran."""

    rows: list[Row] = field(default_factory=list)


REPORT = pytest.StashKey[Report]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[REPORT] = Report()


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    return request.config.stash[REPORT]


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Prompts that the pair has never seen, of different lengths."""
    found = held_out_prompts(NUM_PROMPTS, num_chars=600)
    assert len(found) == NUM_PROMPTS
    # Short and long ones in a batch: chunks, padding and positions all differ.
    return [prompt[: 40 + 24 * index] for index, prompt in enumerate(found)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rows = terminalreporter.config.stash[REPORT].rows
    if not rows:
        return
    terminalreporter.section("exactness: speculative against plain decoding, fp32")
    terminalreporter.write_line(
        f"{'draft':<22} {'K':>2} {'T':>4} {'prompts':>7} {'tokens':>7} {'different':>9} "
        f"{'hit rate':>8} {'late':>5} {'tokens a round':>14} {'accepted':>8}"
    )
    for row in sorted(rows, key=lambda row: (row.draft, row.lookahead, row.temperature)):
        rate = f"{row.hits / row.looked_up:.2f}" if row.looked_up else "-"
        kept = row.num_proposed - row.num_rejected
        accepted = f"{kept / row.num_proposed:.2f}" if row.num_proposed else "-"
        terminalreporter.write_line(
            f"{row.draft:<22} {row.lookahead:>2} {row.temperature:>4} {row.num_prompts:>7} "
            f"{row.num_tokens:>7} {row.num_different:>9} {rate:>8} {row.late:>5} "
            f"{row.tokens_per_round:>14.2f} {accepted:>8}"
        )

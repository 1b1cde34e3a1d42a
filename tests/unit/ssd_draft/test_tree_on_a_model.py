"""The tree over the real engine, compared with a second implementation that runs plain text."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engines import load, on
from tests.model_folders import model_folder
from torch import Tensor

from ssd.engine import static_execution
from ssd.engine.capture import Capture
from ssd.engine.config import STATIC, EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.sampling.soft_filters import FACTOR
from ssd.speculation.fan_out import Adaptive
from ssd.speculation.noise import gumbel_noise
from ssd.testing.recorded_graphs import RecordedGraphs
from ssd.testing.tiny_folder import VOCAB_SIZE
from ssd.types import OpenSession
from ssd_bench.sampling.model import load_model
from ssd_draft.sessions import Move
from ssd_draft.table_build import TableBuild
from ssd_draft.token_choice import KeyedChoice, RingChoice
from ssd_draft.tree import Tree, num_noise_rows

Plain = Callable[[tuple[int, ...]], Tensor]
K = 3
N = 8
CHUNK = 16
BLOCKS_EACH = 16
ENGINE = EngineConfig(
    dtype="float32",
    max_model_len=16 * BLOCKS_EACH,
    max_num_seqs=3,
    num_columns=K + 1,
    branches=N,
    prefill_chunk=CHUNK,
    num_token_ids=VOCAB_SIZE,
)
folder = model_folder()


@pytest.fixture(scope="module", params=["cpu", "openvino", "static"])
def runner(folder: Path, request: pytest.FixtureRequest) -> DraftRunner:
    engine = on(request.param, ENGINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(static_execution, "capture_of", lambda _device: Capture(RecordedGraphs()))
        return load(DraftRunner, folder, engine)


def begin(tree: Tree, slots: list[int], branches: int = N) -> TableBuild:
    outcomes = tree.select_outcomes(slots, Adaptive()).first(branches)
    return tree.begin_tables(slots, outcomes, K)


def complete(tree: Tree, building: TableBuild) -> None:
    """Run what is left of tables: in one pass, if the engine can."""
    if tree.can_run_whole(building):
        tree.run_whole(building)
    while not building.is_complete:
        tree.run_step(building)


def outcome_of(tables: TableBuild, row: int, branch: int) -> tuple[int, int]:
    """Accepted length and bonus token of a branch."""
    outcomes = tables.outcomes
    return int(outcomes.accepted_BN[row, branch]), int(outcomes.bonus_BN[row, branch])


def build(tree: Tree, slots: list[int], num_steps: int = K + 1, branches: int = N) -> TableBuild:
    building = begin(tree, slots, branches)
    if num_steps > K:
        complete(tree, building)
    for _ in range(num_steps - building.num_steps):
        tree.run_step(building)
    assert building.is_complete == (num_steps > K)
    return building


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    """The logits after tokens, of transformers. The texts of all engines are the same."""
    model = load_model(folder).eval()
    return cache(lambda tokens: model(torch.tensor([tokens]), use_cache=False).logits[0, -1])


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass
class Text:
    """One sequence as plain text."""

    plain: Plain
    committed: list[int]
    temperature: float
    seed: int
    proposal: list[int] = field(default_factory=list)
    top_k: int = 0

    def next_token(self, tokens: list[int]) -> int:
        logits_V = self.plain(tuple(tokens))
        if self.top_k:
            lowest = logits_V.topk(self.top_k).values[-1]
            logits_V = logits_V - FACTOR * (lowest - logits_V).clamp_min(0)
        noise_V = torch.from_numpy(gumbel_noise(self.seed, [len(tokens)], VOCAB_SIZE)[0])
        return int((logits_V + self.temperature * noise_V).argmax())

    def continuation(self, accepted: int, bonus: int) -> list[int]:
        tokens = [*self.committed, *self.proposal[:accepted], bonus]
        for _ in range(K):
            tokens.append(self.next_token(tokens))
        return tokens[-K:]

    def check(self, tables: TableBuild, row: int, depth: int = K) -> None:
        for branch in range(int(tables.outcomes.num_branches_B[row])):
            found = tables.tables_BNK[row, branch].tolist()
            expected = self.continuation(*outcome_of(tables, row, branch))
            assert found == expected[:depth] + [-1] * (K - depth)

    def follow(self, tables: TableBuild, row: int, branch: int, num_proposed: int) -> Move:
        accepted, bonus = outcome_of(tables, row, branch)
        self.committed += [*self.proposal[:accepted], bonus]
        self.proposal = tables.tables_BNK[row, branch, :num_proposed].tolist()
        return Move(accepted + 1, bonus, tuple(self.proposal), branch)

    def stray(self, accepted: int, bonus: int, guess: list[int]) -> Move:
        self.committed += [*self.proposal[:accepted], bonus]
        self.proposal = guess
        return Move(accepted + 1, bonus, tuple(guess), None)


def test_padding_of_the_vocabulary_is_never_chosen(folder: Path) -> None:
    num_token_ids = VOCAB_SIZE - 9
    engine = replace(ENGINE, max_num_seqs=1, num_token_ids=num_token_ids)
    runner = load(DraftRunner, folder, engine)
    choice = RingChoice(1, num_noise_rows(engine), VOCAB_SIZE)
    tree = Tree(runner, choice, engine, num_token_ids)
    opening = OpenSession(session=1, token_ids=(5,), seed=7, temperature=1.0, max_len=64)
    tree.open(0, list(range(1, 1 + BLOCKS_EACH)), opening)
    tree.start(0, 5, ())
    for _ in range(3):
        tables = build(tree, [0])
        assert 0 <= int(tables.tables_BNK.max()) < num_token_ids
        assert int(tables.outcomes.bonus_BN.max()) < num_token_ids
        tokens = tuple(tables.tables_BNK[0, 0].tolist())
        accepted, bonus = outcome_of(tables, 0, 0)
        tree.advance([0], [Move(accepted + 1, bonus, tokens, 0)])


def opened(tree: Tree, slots: list[int], texts: list[Text]) -> None:
    for slot, text in zip(slots, texts, strict=True):
        num_blocks = tree.engine.blocks_per_sequence
        first_block = 1 + slot * num_blocks
        blocks = list(range(first_block, first_block + num_blocks))
        opening = OpenSession(
            session=slot,
            token_ids=tuple(text.committed),
            seed=text.seed,
            temperature=text.temperature,
            max_len=64,
            top_k=text.top_k,
        )
        tree.open(slot, blocks, opening)
        prompt = text.committed[:-1]
        for first in range(0, len(prompt), CHUNK):
            tree.store(slot, first, prompt[first : first + CHUNK])
        tree.start(slot, text.committed[-1], ())


@pytest.fixture
def tree(runner: DraftRunner) -> Iterator[Tree]:
    """A tree on the runner of all tests, which has no sessions before and after."""
    engine = runner.engine
    choice = (
        KeyedChoice(engine.max_num_seqs, engine.device)
        if engine.engine == STATIC
        else RingChoice(engine.max_num_seqs, num_noise_rows(engine), VOCAB_SIZE)
    )
    yield Tree(runner, choice, engine, VOCAB_SIZE)
    for slot in range(engine.max_num_seqs):
        runner.end_session(slot)


def num_columns(tree: Tree, num_steps: int) -> int:
    """Columns of a table after some steps; a device has not read the newest one yet."""
    return min(num_steps, K) - (tree._lag if num_steps <= K else 0)


@pytest.fixture
def texts(plain: Plain) -> list[Text]:
    digits = np.random.default_rng(5)
    return [
        Text(plain, digits.integers(0, 256, length).tolist(), temperature, seed=length)
        for length, temperature in ((40, 0.0), (1, 1.0), (17, 0.6))
    ]


SLOTS = [2, 0, 1]


@pytest.mark.parametrize("branches", [(N,), (2, N, 4)])
@pytest.mark.parametrize("num_steps", [(K + 1,), (1, 2, 3, 1, 4)])
def test_the_tables_equal_those_of_plain_text(
    tree: Tree, texts: list[Text], num_steps: tuple[int, ...], branches: tuple[int, ...]
) -> None:
    """Trees that end early, too: the next tree begins with the tokens that were chosen."""
    opened(tree, SLOTS, texts)
    tables = build(tree, SLOTS)
    depth = K
    for turn in range(5):
        for row, text in enumerate(texts):
            text.check(tables, row, depth)
        count = turn % (depth + 1)
        moves = [
            texts[0].follow(tables, 0, int(tables.outcomes.accepted_BN[0].argmax()), depth),
            texts[1].follow(tables, 1, turn % int(tables.outcomes.num_branches_B[1]), count),
            texts[2].stray(min(1, len(texts[2].proposal)), 50 + turn, [60, 61, 62][:count]),
        ]
        tree.advance(SLOTS, moves)
        steps = num_steps[turn % len(num_steps)]
        tables = build(tree, SLOTS, steps, branches[turn % len(branches)])
        depth = num_columns(tree, steps)
        while tree.fill_ahead():
            pass


def test_batches_of_tables_take_turns_and_lose_sessions(tree: Tree, texts: list[Text]) -> None:
    opened(tree, SLOTS, texts)
    several = begin(tree, SLOTS[:2])
    tree.run_step(several)
    other = begin(tree, SLOTS[2:])
    tree.run_step(other)
    if tree._lag:
        tree.run_step(several)
    texts[0].check(several, 0, 1)
    tree.keep(several, [1])
    moved = texts[0].follow(several, 0, 1, 1)
    for _ in range(K + tree._lag - 1):
        if not several.is_complete:
            tree.run_step(several)
        tree.run_step(other)
    tree.advance(SLOTS[:1], [moved])
    texts[0].check(build(tree, SLOTS[:1]), 0)
    texts[1].check(several, 1)
    texts[2].check(other, 0)


def test_several_commits_are_applied_as_one(tree: Tree, texts: list[Text]) -> None:
    opened(tree, SLOTS, texts)
    build(tree, SLOTS)
    moves = []
    for number, text in enumerate(texts):
        whole = text.stray(0, 40 + number, [50, 51][:number])
        for accepted in (number // 2, 0):
            whole = whole.then(text.stray(accepted, 60 + number, [70, 71, 72][: 2 - number]))
        moves.append(whole)
    tree.advance(SLOTS, moves)
    tables = build(tree, SLOTS)
    for row, text in enumerate(texts):
        text.check(tables, row)


def test_a_batch_that_lost_a_session_before_its_first_step_builds_the_table_of_the_other(
    tree: Tree, texts: list[Text]
) -> None:
    opened(tree, SLOTS, texts)
    building = begin(tree, SLOTS[:2])
    tree.keep(building, [1])
    complete(tree, building)
    assert building.depth == K
    texts[1].check(building, 1)


@pytest.mark.parametrize("slots", [SLOTS, SLOTS[1:2]])
def test_tables_follow_the_filter_of_their_session_alone(
    tree: Tree, texts: list[Text], slots: list[int]
) -> None:
    """Alone and beside sessions without a filter, whose tables are as before."""
    some = [text for slot, text in zip(SLOTS, texts, strict=True) if slot in slots]
    filtered = texts[1]
    filtered.temperature, filtered.top_k = 2.0, 3
    opened(tree, slots, some)
    for turn in range(4):
        tables = build(tree, slots)
        for row, text in enumerate(some):
            text.check(tables, row)
        moves = [text.follow(tables, row, turn, K) for row, text in enumerate(some)]
        tree.advance(slots, moves)
    tokens = filtered.committed[1:]
    filtered.top_k = 0
    unfiltered = [filtered.next_token(filtered.committed[: 1 + at]) for at in range(len(tokens))]
    assert tokens != unfiltered


@pytest.mark.parametrize("index", range(3))
def test_the_tables_of_one_session_equal_those_of_plain_text(
    tree: Tree, texts: list[Text], index: int
) -> None:
    """In one pass where the engine has it, mixed with tables that end early."""
    slots, text = SLOTS[:1], texts[index]
    opened(tree, slots, [text])
    assert tree.can_run_whole(begin(tree, slots)) == (tree.engine.engine == "openvino")
    for turn in range(6):
        steps, branches = (K + 1, 2, K + 1)[turn % 3], (N, N, N // 2)[turn % 3]
        tables = build(tree, slots, steps, branches)
        depth = num_columns(tree, steps)
        text.check(tables, 0, depth)
        tree.advance(slots, [text.follow(tables, 0, turn % 4, depth)])


def test_short_and_long_tables_of_one_session_take_turns(tree: Tree, texts: list[Text]) -> None:
    slots, text = SLOTS[:1], texts[0]
    opened(tree, slots, [text])
    for turn, length in enumerate((K, K - 1, K, K - 1, K - 1, K)):
        outcomes = tree.select_outcomes(slots, Adaptive())
        building = tree.begin_tables(slots, outcomes, length)
        complete(tree, building)
        assert building.depth == length
        text.check(building, 0, length)
        # Branches with all their tokens, and an outcome that no branch has.
        if turn == 2:
            move = text.stray(0, 40, [50, 51, 52])
        else:
            move = text.follow(building, 0, turn, length)
        tree.advance(slots, [move])

"""The tree over the real engine, compared with a second implementation that runs plain text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tools.distill.model import TrainableLlama, load_model

from ssd.engine.config import EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.runner import load_runner
from ssd.speculation.fan_out import Adaptive, FanOutPolicy
from ssd.speculation.noise import NoiseRing, gumbel_noise
from ssd.testing.tiny_folder import VOCAB_SIZE, write_tiny_folder
from ssd_draft.sessions import Move
from ssd_draft.tree import NewSession, TableBatch, Tree, TreeShape

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
SHAPE = TreeShape(ENGINE, VOCAB_SIZE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def runner(folder: Path) -> DraftRunner:
    return load_runner(DraftRunner, folder, ENGINE, lambda _stage, _fraction: None)


def build(tree: Tree, slots: list[int], policies: Sequence[FanOutPolicy]) -> TableBatch:
    tables: list[TableBatch] = []
    tree.build_tables(slots, policies, tables.append)
    (built,) = tables
    return built


@pytest.fixture(scope="module")
def plain(folder: Path) -> TrainableLlama:
    return load_model(folder).float().eval()


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@dataclass
class Text:
    """One sequence as plain text."""

    model: TrainableLlama
    committed: list[int]
    temperature: float
    seed: int
    proposal: list[int] = field(default_factory=list)

    def next_token(self, tokens: list[int]) -> int:
        logits_V = self.model(torch.tensor([tokens]))[0, -1].float()
        noise_V = torch.from_numpy(gumbel_noise(self.seed, [len(tokens)], VOCAB_SIZE)[0])
        return int((torch.log_softmax(logits_V, -1) + self.temperature * noise_V).argmax())

    def continuation(self, accepted: int, bonus: int) -> list[int]:
        tokens = [*self.committed, *self.proposal[:accepted], bonus]
        for _ in range(K):
            tokens.append(self.next_token(tokens))
        return tokens[-K:]

    def check(self, tables: TableBatch, row: int) -> None:
        for branch in range(int(tables.num_branches_B[row])):
            accepted, bonus = (
                tables.accepted_BN[row, branch],
                tables.bonus_BN[row, branch],
            )
            found = tables.tokens_BNK[row, branch].tolist()
            assert found == self.continuation(int(accepted), int(bonus))

    def follow(self, tables: TableBatch, row: int, branch: int, num_proposed: int) -> Move:
        accepted, bonus = (
            int(tables.accepted_BN[row, branch]),
            int(tables.bonus_BN[row, branch]),
        )
        self.committed += [*self.proposal[:accepted], bonus]
        self.proposal = tables.tokens_BNK[row, branch, :num_proposed].tolist()
        return Move(accepted + 1, bonus, tuple(self.proposal), branch)

    def stray(self, accepted: int, bonus: int, guess: list[int]) -> Move:
        self.committed += [*self.proposal[:accepted], bonus]
        self.proposal = guess
        return Move(accepted + 1, bonus, tuple(guess), None)


def test_padding_of_the_vocabulary_is_never_chosen(folder: Path) -> None:
    num_token_ids = VOCAB_SIZE - 9
    engine = replace(ENGINE, max_num_seqs=1, num_token_ids=num_token_ids)
    shape = TreeShape(engine, num_token_ids)
    runner = load_runner(DraftRunner, folder, engine, lambda _stage, _fraction: None)
    tree = Tree(runner, NoiseRing(1, shape.num_noise_rows, VOCAB_SIZE), shape)
    tree.open(NewSession(0, list(range(1, 1 + BLOCKS_EACH)), 7, 0, 1.0))
    tree.start(0, 5, ())
    for _ in range(3):
        tables = build(tree, [0], [Adaptive()])
        assert 0 <= int(tables.tokens_BNK.max()) < num_token_ids
        assert int(tables.bonus_BN.max()) < num_token_ids
        tokens = tuple(tables.tokens_BNK[0, 0].tolist())
        accepted, bonus = int(tables.accepted_BN[0, 0]), int(tables.bonus_BN[0, 0])
        tree.advance([0], [Move(accepted + 1, bonus, tokens, 0)])


def test_the_tables_equal_those_of_plain_text(runner: DraftRunner, plain: TrainableLlama) -> None:
    tree = Tree(runner, NoiseRing(ENGINE.max_num_seqs, SHAPE.num_noise_rows, VOCAB_SIZE), SHAPE)
    digits = np.random.default_rng(5)
    texts = [
        Text(plain, digits.integers(0, 256, length).tolist(), temperature, seed=length)
        for length, temperature in ((40, 0.0), (1, 1.0), (17, 0.6))
    ]
    slots = [2, 0, 1]
    for slot, text in zip(slots, texts, strict=True):
        first_block = 1 + slot * BLOCKS_EACH
        blocks = list(range(first_block, first_block + BLOCKS_EACH))
        tree.open(NewSession(slot, blocks, text.seed, 0, text.temperature))
        prompt = text.committed[:-1]
        for first in range(0, len(prompt), CHUNK):
            tree.store(slot, first, prompt[first : first + CHUNK])
        tree.start(slot, text.committed[-1], ())
    policies = [Adaptive()] * len(slots)
    tables = build(tree, slots, policies)
    for turn in range(5):
        for row, text in enumerate(texts):
            text.check(tables, row)
        count = turn % (K + 1)
        moves = [
            texts[0].follow(tables, 0, int(tables.accepted_BN[0].argmax()), K),
            texts[1].follow(tables, 1, turn % int(tables.num_branches_B[1]), count),
            texts[2].stray(min(1, len(texts[2].proposal)), 50 + turn, [60, 61, 62][:count]),
        ]
        tree.advance(slots, moves)
        tables = build(tree, slots, policies)
        while tree.fill_ahead():
            pass

"""Preemption, shared prompts and chunks change no token, on every engine of a CPU.

The rounds, the scheduler and the models are real. The reference is each text alone, without
speculation and without the prefix cache.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.engines import load, on
from tests.unit.ssd_target.bench import Bench, Collector, num_preemptions

from ssd.engine.config import EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.target_runner import TargetRunner
from ssd.testing.tiny_folder import VOCAB_SIZE, write_tiny_folder
from ssd.types import Mode, SamplingParams
from ssd_target.decoding.sampler import KeyedSampler, RingSampler

MAX_LEN = 128
LOOKAHEAD = 3
ENGINE = EngineConfig(
    max_model_len=MAX_LEN, max_num_seqs=3, num_columns=4, prefill_chunk=16, kv_cache_bytes=1 << 24
)
WARM = SamplingParams(temperature=0.9, seed=5)
BEGINNING = [(7 * number) % 50 + 1 for number in range(66)]
PROMPTS = [BEGINNING[:40], [*BEGINNING[:36], 3, 4, 5], [*BEGINNING, 9], BEGINNING[:40]]
LENGTHS = (65, 65, 20, 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("preemption") / "tiny"
    return write_tiny_folder(path, max_len=MAX_LEN, attention_gain=8.0)


@pytest.mark.parametrize(
    ("name", "deterministic"),
    [("cpu", False), ("openvino", False), ("openvino", True), ("static", False)],
)
def test_a_shortage_of_blocks_and_shared_prompts_change_no_token(
    folder: Path, name: str, *, deterministic: bool
) -> None:
    runner = load(TargetRunner, folder, replace(on(name, ENGINE), deterministic=deterministic))
    runner.warm_up(lambda _stage, _fraction: None)
    assert runner.joins_prompts == (name == "openvino" and not deterministic)
    expected = []
    for prompt, length in zip(PROMPTS, LENGTHS, strict=True):
        bench = Bench(runner=runner, num_blocks=runner.num_blocks, prefix_cache=False)
        sink = bench.submit(prompt, length, sampling=WARM, mode=Mode.AUTOREGRESSIVE)
        bench.run()
        expected.append(sink.tokens)
    of_draft = replace(on(name, ENGINE), num_columns=LOOKAHEAD + 1, branches=1)
    draft = load(DraftRunner, folder, of_draft)
    # Enough for one and a half sequences of maximum length.
    num_blocks = 1 + 3 * MAX_LEN // 2 // runner.engine.block_size
    bench = Bench(runner=runner, own_draft=draft, num_blocks=num_blocks, step_tokens=64)
    modes = (Mode.AUTOREGRESSIVE, Mode.AUTOREGRESSIVE, Mode.SYNCHRONOUS, Mode.SYNCHRONOUS)
    sinks = [
        bench.submit(prompt, length, sampling=WARM, mode=mode)
        for prompt, length, mode in zip(PROMPTS, LENGTHS, modes, strict=True)
    ]
    before = num_preemptions()
    bench.run(1000)
    assert [sink.tokens for sink in sinks] == expected
    assert num_preemptions() > before
    assert any(sink.usage.cached_tokens for sink in sinks)


@pytest.mark.parametrize(("name", "sampler"), [("cpu", KeyedSampler), ("openvino", RingSampler)])
@pytest.mark.parametrize("padding", [(63, 0), (0, 63)])
def test_a_pair_with_different_padding_changes_no_token(
    tmp_path: Path, name: str, sampler: type[RingSampler | KeyedSampler], padding: tuple[int, int]
) -> None:
    engine = replace(on(name, ENGINE), num_token_ids=VOCAB_SIZE)
    target, own_draft = (
        write_tiny_folder(tmp_path / kind, vocab_size=VOCAB_SIZE + rows)
        for kind, rows in zip(("target", "draft"), padding, strict=True)
    )
    runner = load(TargetRunner, target, engine)
    runner.warm_up(lambda _stage, _fraction: None)
    of_draft = replace(engine, num_columns=LOOKAHEAD + 1, branches=1)
    draft = load(DraftRunner, own_draft, of_draft)
    for prompts in (PROMPTS[:1], PROMPTS[:2]):
        plain, ahead = (
            texts(
                Bench(
                    runner=runner, own_draft=draft, num_blocks=runner.num_blocks, sampler=sampler
                ),
                prompts,
                mode,
            )
            for mode in (Mode.AUTOREGRESSIVE, Mode.SYNCHRONOUS)
        )
        assert [sink.tokens for sink in ahead] == [sink.tokens for sink in plain]
        assert all(sink.statistics.accepted_tokens for sink in ahead)


def texts(bench: Bench, prompts: list[list[int]], mode: Mode) -> list[Collector]:
    """Continue prompts together."""
    sinks = [bench.submit(prompt, 20, sampling=WARM, mode=mode) for prompt in prompts]
    bench.run()
    return sinks

"""Mode SYNCHRONOUS: the tokens of plain decoding, K of them proposed in each round."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Literal
from unittest.mock import Mock

import pytest
from prometheus_client import REGISTRY
from tests.fake_gpu import on_fake_gpu
from tests.sequences import make_sequence
from tests.unit.ssd.speculation.measured import measure
from tests.unit.ssd_target.bench import ENGINE, GREEDY, LOOKAHEAD, WARM, Bench, own_draft, plain

from ssd.engine.config import EngineConfig
from ssd.engine.draft_runner import DraftRunner
from ssd.engine.kv_cache.block_pool import BlockPool
from ssd.speculation.backup import BACKUPS, BackupProposal, propose_nothing
from ssd.speculation.sources import TRIAL_ROUNDS
from ssd.testing.fake_device import fake_device
from ssd.testing.scripted_draft import Behaviour
from ssd.types import LookupResult, Mode, SamplingParams, TokenId
from ssd_target.decoding import sequential_drafter
from ssd_target.decoding.sampler import KeyedSampler, Proposal, RingSampler
from ssd_target.decoding.sequence import Sequence
from ssd_target.decoding.sequential_drafter import SequentialDrafter


def num_backup_rounds() -> float:
    """Value of the metric."""
    return REGISTRY.get_sample_value("ssd_rounds_total", {"result": "backup"}) or 0.0


SAMPLERS = pytest.mark.parametrize("sampler", [RingSampler, KeyedSampler])


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("runs_whole", [False, True], ids=["steps", "whole"])
@pytest.mark.parametrize("kind", ["perfect", "other"])
@pytest.mark.parametrize("joins_prompts", [False, True])
def test_a_draft_on_the_targets_device_changes_no_token(
    kind: Literal["perfect", "other"],
    sampling: SamplingParams,
    *,
    runs_whole: bool,
    joins_prompts: bool,
) -> None:
    for length in (1, 2, 3, 8, 9, 17):
        draft = own_draft(kind, runs_whole=runs_whole)
        bench = Bench(own_draft=draft, joins_prompts=joins_prompts)
        prompt = [(3 * i + 1) % 13 for i in range(length)]
        sink = bench.submit(prompt, 21, sampling=sampling, mode=Mode.SYNCHRONOUS)
        bench.run()
        assert sink.tokens == plain(prompt, 21, sampling)
        assert sink.statistics.mode is Mode.SYNCHRONOUS
        assert (sink.statistics.hits, sink.statistics.misses, sink.statistics.late) == (0, 0, 0)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("runs_whole", [False, True], ids=["steps", "whole"])
def test_a_perfect_draft_proposes_what_is_accepted(
    sampling: SamplingParams, *, runs_whole: bool
) -> None:
    # Each round accepts the whole proposal, whose last token then has no KV entry after steps.
    bench = Bench(own_draft=own_draft("perfect", runs_whole=runs_whole))
    rounds = 5
    sink = bench.submit(
        [1, 2, 3], rounds * (LOOKAHEAD + 1), sampling=sampling, mode=Mode.SYNCHRONOUS
    )
    bench.run()
    assert sink.statistics.rounds == rounds
    assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens
    assert sink.statistics.proposed_tokens == rounds * LOOKAHEAD


def test_a_draft_proposes_in_one_pass_after_a_first_token_without_a_proposal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft = own_draft("perfect", runs_whole=True)
    bench = Bench(own_draft=draft, joins_prompts=True)
    monkeypatch.setattr(bench.loop._drafter, "_run_steps", None)
    sink = bench.submit([1, 2, 3], 9, mode=Mode.SYNCHRONOUS)
    bench.run()
    # The first token, and two proposals with their bonus tokens.
    assert sink.statistics.rounds == 3
    assert sink.tokens == plain([1, 2, 3], 9, GREEDY)


@SAMPLERS
@pytest.mark.parametrize("runs_whole", [False, True], ids=["steps", "whole"])
def test_modes_of_one_batch_do_not_disturb_each_other(
    sampler: type[RingSampler | KeyedSampler], *, runs_whole: bool
) -> None:
    # The longer text is alone after the end of the shorter one.
    bench = Bench(own_draft=own_draft("perfect", runs_whole=runs_whole), sampler=sampler)
    bench.join([Behaviour.HIT])
    modes = (Mode.SYNCHRONOUS, Mode.SPECULATIVE, Mode.AUTOREGRESSIVE, Mode.SYNCHRONOUS)
    prompts = [[number + 1] * (number + 1) for number in range(len(modes))]
    limits = (20, 24, 9, 13)
    sinks = [
        bench.submit(prompt, limit, mode=mode)
        for prompt, limit, mode in zip(prompts, limits, modes, strict=True)
    ]
    bench.run()
    for sink, prompt, limit, mode in zip(sinks, prompts, limits, modes, strict=True):
        assert sink.tokens == plain(prompt, limit, GREEDY)
        assert sink.statistics.mode is mode
        if mode is Mode.SYNCHRONOUS:
            assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens > 0


@pytest.mark.parametrize("runs_whole", [False, True], ids=["steps", "whole"])
@pytest.mark.parametrize("num_texts", [1, 2])
@pytest.mark.parametrize("num_repeated", [1, 9, 40])
def test_a_better_backup_replaces_the_draft_which_then_goes_on_with_the_text(
    num_texts: int, num_repeated: int, monkeypatch: pytest.MonkeyPatch, *, runs_whole: bool
) -> None:
    limit, repeated = 55, range(12, 12 + num_repeated)
    prompts = ([1, 2, 3], [4] * 9)[:num_texts]
    texts = [[*prompt, *plain(prompt, limit - len(prompt), WARM)] for prompt in prompts]
    bench = Bench(own_draft=own_draft("perfect", runs_whole=runs_whole), backup="ngram")
    drafter = bench.loop._drafter
    assert drafter is not None
    measure(drafter._sources, 0.8, 0.9, repeats=True)

    def backup(tokens: Rows[TokenId], num: int) -> BackupProposal:
        """Propose the next tokens of one part of the text, and nothing in the others."""
        at = len(tokens)
        if at not in repeated:
            return BackupProposal()
        text = next(text for text in texts if text[:at] == list(tokens))
        return BackupProposal(tuple(text[at : at + num]), repeats=True)

    drafted = list[tuple[list[TokenId], tuple[TokenId, ...]]]()

    def record(rows: Rows[Sequence]) -> dict[int, Proposal]:
        most_behind = ENGINE.prefill_chunk + LOOKAHEAD + 1
        assert not any(drafter._is_behind(each, most_behind) for each in rows)
        proposals = from_draft(rows)
        drafted.extend((list(each.tokens), proposals[each.sequence_id]) for each in rows)
        return proposals

    from_draft = drafter._from_draft
    monkeypatch.setattr(drafter, "_from_draft", record)
    monkeypatch.setitem(BACKUPS, "ngram", backup)
    sinks = [
        bench.submit(prompt, limit - len(prompt), sampling=WARM, mode=Mode.SYNCHRONOUS)
        for prompt in prompts
    ]
    counted = num_backup_rounds()
    bench.run()
    of_requests = sum(sink.statistics.backup_rounds for sink in sinks)
    assert num_backup_rounds() - counted == of_requests
    for sink, prompt, text in zip(sinks, prompts, texts, strict=True):
        assert sink.tokens == text[len(prompt) :]
        assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens
        assert sink.statistics.mode is Mode.SYNCHRONOUS
        # No round may begin at the only token before which the backup proposes.
        assert num_repeated == 1 or 0 < sink.statistics.backup_rounds < sink.statistics.rounds
    before = [tokens for tokens, _ in drafted if len(tokens) < repeated.start]
    after = [tokens for tokens, _ in drafted if len(tokens) >= repeated.stop]
    assert before
    assert after or num_repeated == 40
    assert len(drafted) == len(before) + len(after)
    # A wrong entry of the draft would change what it proposes.
    for tokens, proposal in drafted:
        assert [*tokens, *proposal] in [text[: len(tokens) + len(proposal)] for text in texts]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_round_tests_the_proposals_of_draft_and_backup(
    monkeypatch: pytest.MonkeyPatch, *, is_right: bool
) -> None:
    text = [1, 2, 3, *plain([1, 2, 3], 50, GREEDY)]

    def backup(tokens: Rows[TokenId], num: int) -> BackupProposal:
        proposal = text[len(tokens) : len(tokens) + num]
        return BackupProposal(
            tuple((each + (not is_right)) % 13 for each in proposal), repeats=True
        )

    monkeypatch.setitem(BACKUPS, "ngram", backup)
    bench = Bench(own_draft=own_draft("perfect"), backup="ngram")
    sink = bench.submit([1, 2, 3], 50, mode=Mode.SYNCHRONOUS)
    bench.run()
    assert sink.tokens == text[3:]
    # The wrong proposals are measured, not used.
    assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens
    assert bench.loop._drafter is not None
    of_draft, of_backup = bench.loop._drafter._sources.acceptances(repeats=True)
    assert of_draft > 0.85
    assert of_backup > 0.85 if is_right else of_backup < 0.45


def test_a_draft_that_is_replaced_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(own_draft=own_draft("perfect"), backup="ngram")
    drafter = bench.loop._drafter
    assert drafter is not None
    measure(drafter._sources, 0.8, 0.9, repeats=True)
    drafter._sources.num_rounds = TRIAL_ROUNDS - 3
    found, from_draft = list[int](), drafter._from_draft

    def record(rows: Rows[Sequence]) -> dict[int, Proposal]:
        found.append(drafter._sources.num_rounds)
        return from_draft(rows)

    propose, woken = drafter.propose, list[int]()

    def count_wakeups(
        rows: Rows[Sequence], before_pass: Callable[[], None]
    ) -> list[tuple[Sequence, Proposal, LookupResult]]:
        wake = Mock(side_effect=before_pass)
        proposals = propose(rows, wake)
        woken.append(wake.call_count)
        return proposals

    monkeypatch.setattr(drafter, "propose", count_wakeups)
    monkeypatch.setattr(drafter, "_from_draft", record)
    monkeypatch.setitem(
        BACKUPS, "ngram", lambda _tokens, num: BackupProposal((1,) * num, repeats=True)
    )
    sink = bench.submit([1, 2, 3], 12, mode=Mode.SYNCHRONOUS)
    bench.run()
    assert sink.tokens == plain([1, 2, 3], 12, GREEDY)
    assert found[0] == TRIAL_ROUNDS
    assert woken[:3] == [0, 0, 1], "readers are woken before a pass of the draft"


def test_a_sequence_without_blocks_of_the_draft_runs_without_proposals() -> None:
    # Blocks of 4 tokens: the first sequence takes 3 of 3, and the second one needs 4.
    bench = Bench(own_draft=own_draft("perfect", num_blocks=4))
    first_prompt, second_prompt = [1, 2, 3], [4, 5, 6] * 4
    first = bench.submit(first_prompt, 8, mode=Mode.SYNCHRONOUS)
    second = bench.submit(second_prompt, 12, mode=Mode.SYNCHRONOUS)
    bench.run()
    assert first.tokens == plain(first_prompt, 8, GREEDY)
    assert second.tokens == plain(second_prompt, 12, GREEDY)
    assert first.statistics.mode is Mode.SYNCHRONOUS
    assert second.statistics.mode is Mode.AUTOREGRESSIVE


def test_a_sequence_gets_blocks_of_the_draft_as_its_text_grows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequential_drafter, "MIN_REMAINING_TOKENS", 8)
    # Both texts end with 7 blocks, of which the draft has 8.
    draft = own_draft("perfect", num_blocks=9)
    bench = Bench(own_draft=draft)
    prompts = [1, 2, 3], [4, 5, 6]
    sinks = [bench.submit(prompt, 22, mode=Mode.SYNCHRONOUS) for prompt in prompts]
    bench.run()
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == plain(prompt, 22, GREEDY)
        assert sink.statistics.mode is Mode.SYNCHRONOUS
        assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens > 0
    # The one that was admitted last loses its blocks until the other one has ended.
    older, newer = ([len(chunk.token_ids) for chunk in sink.chunks] for sink in sinks)
    assert set(older[:-1]) == {LOOKAHEAD + 1}
    assert newer == [4, 4, 1, 1, 1, 1, 4, 4, 2]
    assert len(draft.own_XNP.unique()) == 1, "entries are dropped with their texts"


def test_a_sequence_that_has_lost_its_blocks_is_not_passed_by_newcomers_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequential_drafter, "AHEAD_TOKENS", 8)
    monkeypatch.setattr(sequential_drafter, "MIN_REMAINING_TOKENS", 8)
    # 16 blocks of 4 tokens. The second sequence may fill the context of the model.
    bench = Bench(own_draft=own_draft("perfect", num_blocks=17), num_blocks=200)
    bench.submit([1, 2, 3] * 13, 3, mode=Mode.SYNCHRONOUS)
    bench.run_rounds(1)
    old = bench.submit([4, 5, 6] * 6, ENGINE.max_model_len - 18, mode=Mode.SYNCHRONOUS)
    for number in range(4):
        bench.submit([7, 8, number] * 2, 9, mode=Mode.SYNCHRONOUS)
        bench.run_rounds(3)
    assert len(old.chunks[-1].token_ids) == LOOKAHEAD + 1
    bench.run()


def test_a_prompt_that_is_not_finite_leaves_no_blocks_of_the_draft_taken() -> None:
    bench = Bench(own_draft=own_draft("perfect"))
    bench.runner.nan_token = 12
    sink = bench.submit([1, 2, 12, 3], 8, mode=Mode.SYNCHRONOUS)
    bench.run()
    assert sink.error is not None
    assert bench.draft_blocks.num_taken == 0


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_text_that_decodes_while_the_draft_stores_it_has_blocks_for_its_tokens(
    *, is_cached: bool
) -> None:
    bench = Bench(own_draft=own_draft("perfect", num_blocks=100), num_blocks=200, step_tokens=64)
    prompts = [[(number * factor + factor) % 13 for number in range(24)] for factor in (1, 2, 3, 4)]
    for prompt in prompts if is_cached else ():
        bench.submit(prompt, 2)
        bench.run()
    sinks = [bench.submit(prompt, 30, mode=Mode.SYNCHRONOUS) for prompt in prompts]
    bench.run()
    for prompt, sink in zip(prompts, sinks, strict=True):
        assert sink.tokens == plain(prompt, 30, GREEDY)
        # A wrong entry of the draft would cost accepted tokens.
        assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens > 0


@SAMPLERS
def test_a_draft_whose_logits_are_not_finite_proposes_nothing_from_there(
    sampler: type[RingSampler | KeyedSampler],
) -> None:
    expected = plain([1, 2, 3], 20, GREEDY)
    draft = own_draft("perfect")
    draft.nan_token = expected[4]
    bench = Bench(own_draft=draft, sampler=sampler)
    sink = bench.submit([1, 2, 3], 20, mode=Mode.SYNCHRONOUS)
    bench.run()
    assert sink.tokens == expected
    assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens
    assert sink.statistics.rounds > 5


def test_a_draft_stores_a_cached_prompt_and_a_preempted_text_by_itself() -> None:
    bench = Bench(own_draft=own_draft("perfect"), num_blocks=18)
    prompt = [number % 13 for number in range(20)]
    for _ in range(2):
        first = bench.submit(prompt, 40, mode=Mode.SYNCHRONOUS)
        second = bench.submit(prompt, 24, mode=Mode.SYNCHRONOUS)
        bench.run()
        assert first.tokens == plain(prompt, 40, GREEDY)
        assert second.tokens == plain(prompt, 24, GREEDY)
        # A wrong entry of the draft would cost accepted tokens.
        for sink in (first, second):
            assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens > 0


@SAMPLERS
@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("kind", ["perfect", "other"])
def test_texts_with_other_numbers_of_pending_tokens_share_their_steps(
    kind: Literal["perfect", "other"],
    sampling: SamplingParams,
    sampler: type[RingSampler | KeyedSampler],
) -> None:
    # The later text has one pending token while the first one has two; the ends differ, too.
    bench = Bench(own_draft=own_draft(kind), sampler=sampler)
    prompts, limits = ([1, 2, 3], [4] * 9, [5, 6]), (18, 9, 12)
    sinks = []
    for prompt, limit in zip(prompts, limits, strict=True):
        sinks.append(bench.submit(prompt, limit, sampling=sampling, mode=Mode.SYNCHRONOUS))
        bench.run_rounds(2)
    bench.run()
    for sink, prompt, limit in zip(sinks, prompts, limits, strict=True):
        assert sink.tokens == plain(prompt, limit, sampling)
        if kind == "perfect":
            assert sink.statistics.accepted_tokens == sink.statistics.proposed_tokens > 0
            assert sink.statistics.rounds == -(-limit // (LOOKAHEAD + 1))


@pytest.mark.timeout(60)  # The model is prepared on a fake device: 2 s of a slow core.
@pytest.mark.parametrize(("num_texts", "sampling"), [(1, GREEDY), (3, WARM)])
def test_a_proposal_waits_for_its_device_once(num_texts: int, sampling: SamplingParams) -> None:
    engine = EngineConfig(max_model_len=64, max_num_seqs=4, num_columns=LOOKAHEAD + 1, branches=1)
    with fake_device() as device:
        runner = on_fake_gpu(DraftRunner, engine, device)
        sampler = KeyedSampler(runner.engine, runner.model.vocab_size)
        drafter = SequentialDrafter(runner, BlockPool(20), sampler, lambda: propose_nothing)
        texts = [
            make_sequence((1, 2, 0), sampling, sequence_id=slot, slot=slot, max_len=24 - 9 * slot)
            for slot in range(num_texts)
        ]
        for text in texts:
            sampler.admit(text)
            drafter.admit(text)
            drafter.store([text])
        # All that is read of this device is 0, and the whole first proposal is accepted.
        limits = [LOOKAHEAD, LOOKAHEAD, LOOKAHEAD - 1][:num_texts]
        for _ in range(2):
            num_reads = device.num_reads
            proposals = drafter.propose(texts, lambda: None)
            assert [tokens for _, tokens, _ in proposals] == [(0,) * limit for limit in limits]
            assert device.num_reads == num_reads + 1
            texts[0].append((*proposals[0][1], 0))

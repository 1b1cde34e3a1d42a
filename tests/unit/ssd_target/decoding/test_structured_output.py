"""A grammar selects the same tokens in each mode, and ends the text where it ends."""

import re
from functools import cache
from typing import Any

import pytest
from tests.unit.ssd_target.bench import Bench, own_draft
from tokenizers import Tokenizer as LibraryTokenizer
from tokenizers import decoders, models, pre_tokenizers

from ssd.errors import FieldError
from ssd.testing.scripted_draft import Behaviour
from ssd.text.grammar import Grammar, GrammarCompiler, GrammarSource
from ssd.text.tokenizer import HFTokenizer
from ssd.types import FinishReason, Mode, SamplingParams
from ssd_target.decoding.sampler import KeyedSampler, RingSampler

ALPHABET = '0123\0[],ab{}"'
"""The text of each token; the fifth one is the end."""
EOS = 4
PROMPT = (1, 2, 3)
LIMIT = 30
REGEX = r"\[([0-3]{1,3},){2,5}[ab]+\]"
WARM = SamplingParams(temperature=1.0, seed=11, regex=REGEX)
COLD = SamplingParams(temperature=0.0, regex=REGEX)


@cache
def compiler(alphabet: str = ALPHABET) -> GrammarCompiler:
    vocab = {text: index for index, text in enumerate(alphabet) if index != EOS}
    library = LibraryTokenizer(models.BPE(vocab={**vocab, "</s>": EOS}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["</s>"])
    return GrammarCompiler(HFTokenizer(library, frozenset({EOS})))


def grammar(regex: str = REGEX) -> Grammar:
    return compiler().compile(GrammarSource("regex", regex))


samplers = pytest.mark.parametrize("sampler", [RingSampler, KeyedSampler])


@samplers
@pytest.mark.parametrize("sampling", [WARM, COLD], ids=["warm", "greedy"])
def test_each_mode_selects_the_tokens_of_plain_decoding(
    sampling: SamplingParams, sampler: type[RingSampler | KeyedSampler]
) -> None:
    def run(mode: Mode, text: tuple[int, ...] | None = None) -> Any:
        bench = Bench(deadline_ms=1000.0, own_draft=own_draft("perfect"), sampler=sampler)
        if text is not None:
            script = [Behaviour.HIT, Behaviour.WRONG, Behaviour.HIT, Behaviour.HALF] * 8
            bench.join(script, text=text)
        bench.grammar = grammar()
        found = bench.submit(PROMPT, LIMIT, sampling=sampling, mode=mode, eos=[EOS])
        bench.run()
        return found

    plain = run(Mode.AUTOREGRESSIVE)
    speculative = run(Mode.SPECULATIVE, (*PROMPT, *plain.tokens))
    assert run(Mode.SYNCHRONOUS).tokens == plain.tokens
    assert speculative.tokens == plain.tokens
    assert speculative.statistics.accepted_tokens > 0
    text = "".join(ALPHABET[token] for token in plain.tokens)
    if plain.finish_reason is FinishReason.STOP:
        assert re.fullmatch(REGEX, text)
    else:
        assert text.startswith("[")


def test_the_text_ends_at_the_token_after_which_nothing_can_follow() -> None:
    bench = Bench()
    sampling = SamplingParams(temperature=0.0, regex="ab", ignore_eos=True, min_tokens=9)
    bench.grammar = grammar("ab")
    found = bench.submit(PROMPT, LIMIT, sampling=sampling, eos=[EOS])
    bench.run()
    assert "".join(ALPHABET[token] for token in found.tokens) == "ab"
    assert found.finish_reason is FinishReason.STOP


@samplers
def test_min_tokens_bans_the_end_only_while_the_grammar_allows_something_else(
    sampler: type[RingSampler | KeyedSampler],
) -> None:
    bench = Bench(sampler=sampler)
    bias = ((EOS, 100.0),)
    sampling = SamplingParams(temperature=0.0, regex="a{2,6}", min_tokens=4, logit_bias=bias)
    bench.grammar = grammar("a{2,6}")
    found = bench.submit(PROMPT, LIMIT, sampling=sampling, eos=[EOS])
    bench.run()
    assert [ALPHABET[token] for token in found.tokens[:-1]] == ["a"] * 4
    assert found.tokens[-1] == EOS


@samplers
@pytest.mark.parametrize("min_tokens", [0, 4])
@pytest.mark.parametrize("alphabet", [ALPHABET[:-1], ALPHABET, f"{ALPHABET}xyz"])
def test_a_tokenizer_may_have_fewer_or_more_tokens_than_the_logits_have_columns(
    alphabet: str, min_tokens: int, sampler: type[RingSampler | KeyedSampler]
) -> None:
    bench = Bench(sampler=sampler)
    sampling = SamplingParams(temperature=0.0, regex="[a-z]{5}", min_tokens=min_tokens)
    bench.grammar = compiler(alphabet).compile(GrammarSource("regex", "[a-z]{5}"))
    found = bench.submit(PROMPT, LIMIT, sampling=sampling, eos=[EOS, len(ALPHABET) - 1])
    bench.run()
    assert re.fullmatch("[ab]{5}", "".join(ALPHABET[token] for token in found.tokens[:5]))
    assert found.finish_reason is FinishReason.STOP


def test_a_grammar_that_becomes_too_complex_fails_its_request_and_no_other() -> None:
    class TooComplex(Grammar):
        def allowed(self, *arguments: Any) -> Any:
            bits_CW = super().allowed(*arguments)
            if len(self._tokens) == 3:
                self._fail()
                bits_CW[:] = 0
            return bits_CW

    bench = Bench()
    source = GrammarSource("regex", REGEX)
    bench.grammar = TooComplex(compiler(), source, compiler().shared(source))
    sampling = SamplingParams(temperature=0.0, regex=REGEX)
    found = bench.submit(PROMPT, LIMIT, sampling=sampling, eos=[EOS])
    bench.grammar = None
    other = bench.submit(PROMPT, LIMIT)
    bench.run()
    assert len(found.tokens) == 3
    assert isinstance(found.error, FieldError)
    assert len(other.tokens) == LIMIT


@pytest.mark.parametrize("mode", [Mode.SPECULATIVE, Mode.SYNCHRONOUS])
def test_a_proposal_that_is_too_complex_for_a_grammar_fails_no_text(mode: Mode) -> None:
    class TooComplexAhead(Grammar):
        def allowed(self, proposed: Any, first_column: int, num_columns: int) -> Any:
            assert self.may_look_ahead or not proposed
            bits_CW = super().allowed(proposed, first_column, num_columns)
            if proposed:
                self._fail(proposed[:1])
                bits_CW[1:] = 0
            return bits_CW

    def run(found: Grammar, mode: Mode) -> Any:
        bench = Bench(deadline_ms=1000.0, own_draft=own_draft("other"), sampler=KeyedSampler)
        bench.join([Behaviour.WRONG] * 40, text=(*PROMPT, *[0] * LIMIT))
        bench.grammar = found
        sink = bench.submit(PROMPT, LIMIT, sampling=WARM, mode=mode, eos=[EOS])
        bench.run()
        return sink

    plain = run(grammar(), Mode.AUTOREGRESSIVE)
    source = GrammarSource("regex", REGEX)
    sink = run(TooComplexAhead(compiler(), source, compiler().shared(source)), mode)
    assert sink.error is None
    assert sink.tokens == plain.tokens
    assert 0 < sink.statistics.proposed_tokens < 5


def test_log_probabilities_are_those_of_the_model_before_bias_and_structure() -> None:
    def first_position(sampling: SamplingParams, found: Grammar | None) -> Any:
        bench = Bench()
        bench.grammar = found
        sink = bench.submit(PROMPT, LIMIT, sampling=sampling, eos=[EOS])
        bench.run()
        return next(position for chunk in sink.chunks for position in chunk.logprobs)

    plain = first_position(SamplingParams(temperature=0.0, logprobs=len(ALPHABET)), None)
    by_token = {each.token_id: each for each in plain.top}
    structured = first_position(
        SamplingParams(temperature=0.0, regex="[ab]{2}", logprobs=2, logit_bias=((8, 50.0),)),
        grammar("[ab]{2}"),
    )
    assert ALPHABET[structured.selected.token_id] == "a", "the bias selects it"
    assert structured.top == plain.top[:2]
    assert structured.selected == by_token[structured.selected.token_id]

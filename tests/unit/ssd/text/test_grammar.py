"""The tokens that a JSON schema or a regular expression allows."""

import json
import random
import re
from functools import cache
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLParserLimits

from ssd import demo
from ssd.errors import FieldError
from ssd.ports import Tokenizer
from ssd.testing.tokenizer import ByteTokenizer
from ssd.text import grammar
from ssd.text.grammar import Bools, Grammar, GrammarCompiler, GrammarSource, unpacked_ids
from ssd.text.tokenizer import load_tokenizer
from ssd.types import TokenId

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
PERSON = GrammarSource("json_schema", json.dumps(SCHEMA))
NUMBER = GrammarSource("regex", r"[0-9]{2,4}(\.[0-9]+)?")


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(demo.folder("target"))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def ids(text: str) -> list[TokenId]:
    return tokenizer().encode(text)


def allowed(found: Grammar, *arguments: Any) -> Bools:
    """Whether each token is allowed at each column."""
    return unpacked_ids(found.allowed(*arguments), tokenizer().vocab_size)


def allowed_texts(found: Grammar) -> set[str]:
    return {
        tokenizer().decode([each]) for each in np.flatnonzero(allowed(found, (), 0, 1)[0]).tolist()
    }


DIGITS = GrammarSource("regex", r"x( \d{4}){5}")


@pytest.fixture
def digits_are_complex(monkeypatch: pytest.MonkeyPatch) -> list[TokenId]:
    """A text of ``DIGITS`` that exceeds the limit of complexity."""
    limits = LLParserLimits(step_lexer_fuel=2_000, verbose_errors=False)
    monkeypatch.setattr(grammar, "_LIMITS", limits)
    return ids("x 1234 1234")


@given(st.data())
def test_a_text_of_allowed_tokens_has_the_structure(data: st.DataObject) -> None:
    source = data.draw(st.sampled_from([PERSON, NUMBER]))
    (end,) = tokenizer().eos_token_ids
    found, tokens = compiler().compile(source), []
    for _ in range(60):
        token_ids = np.flatnonzero(allowed(found, (), 0, 1)[0])
        if end in token_ids:
            break
        token = int(data.draw(st.sampled_from(token_ids.tolist())))
        tokens.append(token)
        if found.completes(token):
            break
    else:
        return
    text = tokenizer().decode(tokens)
    if source is NUMBER:
        assert re.fullmatch(NUMBER.text, text)
    else:
        value = json.loads(text)
        assert len(value["name"]) <= 5
        assert set(value) <= {"name", "age"}


def test_the_columns_of_a_proposal_are_those_of_a_text_that_grows_by_its_tokens() -> None:
    proposed = ids('{"name": "bob", "age": 12}')
    ahead, growing = compiler().compile(PERSON), compiler().compile(PERSON)
    together_CV = allowed(ahead, proposed, 0, len(proposed) + 1)
    for column, token in enumerate([*proposed, None]):
        alone_V = allowed(growing, (), 0, 1)[0]
        assert np.array_equal(together_CV[column], alone_V)
        assert np.array_equal(allowed(ahead, proposed, column, 1)[0], alone_V)
        if token is not None:
            assert alone_V[token]
            assert growing.completes(token) == (column == len(proposed) - 1)
    assert np.array_equal(allowed(ahead, (), 0, 1), together_CV[:1]), "looking ahead moves nothing"


def test_after_a_proposed_token_that_is_not_allowed_nothing_is_refused() -> None:
    found = compiler().compile(NUMBER)
    proposed = [*ids("7"), *ids("x"), *ids("1")]
    allowed_CV = allowed(found, proposed, 0, 4)
    assert not allowed_CV[1].all()
    assert allowed_CV[2:].all()
    assert allowed(found, proposed, 3, 1).all()
    assert np.array_equal(allowed(found, proposed, 1, 1)[0], allowed_CV[1])


def test_a_text_may_end_where_its_structure_may_end() -> None:
    (end,) = tokenizer().eos_token_ids
    found = compiler().compile(NUMBER)
    for token in ids("1"):
        assert not allowed(found, (), 0, 1)[0, end]
        assert not found.completes(token)
    for token in ids("2"):
        assert not found.completes(token)
    assert allowed(found, (), 0, 1)[0, end]
    assert found.completes(end)


def test_texts_of_one_grammar_do_not_share_their_position() -> None:
    first, second = compiler().compile(PERSON), compiler().compile(PERSON)
    assert not first.completes(ids("{")[0])
    assert allowed_texts(second) == {"{"}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "json_schema: is not JSON"),
        ("json_schema", "[" * 60_000, "json_schema: is not JSON"),
        ("json_schema", "[]", "json_schema: is a JSON list, must be an object"),
        ("json_schema", '{"type":"foo"}', "Invalid type: foo"),
        ("json_schema", '{"$ref":"#/nope"}', "/nope"),
        ("json_schema", "false", "no text satisfies it: schema is false"),
        ("json_schema", '{"enum":[]}', "no text satisfies it: anyOf is empty"),
        ("json_schema", '{"$ref":"#"}', "cannot be used: no text satisfies it$"),
        ("json_schema", '{"type":"string","pattern":"^a$","minLength":2}', "no text"),
        (
            "json_schema",
            '{"type":"array","minItems":1,"items":{"$ref":"#"}}',
            "no finite text .*each text of # contains",
        ),
        ("json_schema", '{"not":{}}', r'keywords that are not supported: \["not"\]'),
        ("json_schema", '{"type":"string","format":"x"}', "Unknown format: x"),
        ("json_schema", '{"items":' * 150 + "{}" + "}" * 150, "nested too deeply"),
        ("regex", "(", "regex: cannot be used: unclosed group$"),
        ("regex", "(?=a)b", "cannot be used: look-around, including look-ahead"),
        ("regex", r"(a)\1", "cannot be used: backreferences are not supported$"),
        ("regex", r"\bfoo\b", "boundaries of lines and words are not supported"),
        ("regex", r"[^\s\S]", "cannot be used: no text satisfies it$"),
        ("regex", "((a{50}){50}){50}", "limit of complexity: too many"),
        ("regex", "a{1000000}", "regex: cannot be used"),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_with_its_field(
    kind: Literal["json_schema", "regex"], text: str, message: str
) -> None:
    source = GrammarSource(kind, text)
    with pytest.raises(FieldError, match=message) as caught:
        compiler().compile(source)
    assert caught.value.field == source.field
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum"),
        ({"items": {"maximum": -(2**60)}}, "maximum"),
        ({"properties": {"enum": {"anyOf": [{"exclusiveMaximum": -(2**63)}]}}}, "exclusiveMaximum"),
        ({"$defs": {"a": {"multipleOf": 2**54}}}, "multipleOf"),
        ({"const": {"a": [2**53 + 1]}}, "const"),
        ({"enum": ["a", 10**40]}, "enum"),
    ],
)
def test_an_integer_that_a_text_could_not_have_exactly_is_refused(
    schema: dict[str, Any], keyword: str
) -> None:
    with pytest.raises(FieldError, match=rf"{keyword} has -?\d+, .* use a string$") as caught:
        compiler().compile(GrammarSource("json_schema", json.dumps(schema)))
    assert caught.value.field == "sampling.json_schema"


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": -(2**63), "maximum": 2**63 - 1},
        {"exclusiveMinimum": -(2**64), "exclusiveMaximum": 2**64},
    ],
)
def test_a_bound_that_no_text_could_reach_exactly_is_narrowed(bounds: dict[str, int]) -> None:
    number = {"type": "integer"} | bounds
    source = GrammarSource("json_schema", json.dumps({"anyOf": [{"type": "null"}, number]}))
    most = 2**53 - 1 - ("exclusiveMaximum" in bounds)
    for value, is_allowed in ((most, True), (-most, True), (most + 1, False), (-most - 1, False)):
        tokens = ids(str(value))
        columns_CV = allowed(compiler().compile(source), tokens, 0, len(tokens))
        assert columns_CV[range(len(tokens)), tokens].all() == is_allowed, value


def test_large_integers_that_no_text_is_compared_with_are_accepted() -> None:
    large = 2**53 + 1
    person = {"type": "string", "default": large, "examples": [{"minimum": large}]}
    schema = {"properties": {"minimum": person, "const": person}, "default": {"const": large}}
    for accepted in (schema, {"const": str(large)}, {"type": "integer", "maximum": 2**53 - 1}):
        compiler().compile(GrammarSource("json_schema", json.dumps(accepted)))


def test_a_grammar_that_becomes_too_complex_allows_no_token_and_is_compiled_again(
    digits_are_complex: list[TokenId],
) -> None:
    text, some = digits_are_complex, GrammarCompiler(tokenizer())
    for first_columns in (1, len(text) + 1):
        found = some.compile(DIGITS)
        assert allowed(found, text, 0, first_columns)[0].any(), "a new text can use it"
        for token in text:
            if not allowed(found, (), 0, 1).any():
                break
            assert not found.completes(token)
        assert isinstance(found.failure, FieldError)
        assert found.failure.field == "sampling.regex"
        assert not allowed(found, (), 0, 2).any()
        assert some.cached(DIGITS) is None


def test_a_text_that_exceeds_a_limit_ends_no_other_of_its_grammar(
    digits_are_complex: list[TokenId],
) -> None:
    text, some = digits_are_complex, GrammarCompiler(tokenizer())
    undisturbed = GrammarCompiler(tokenizer()).compile(DIGITS)
    hostile, *others = (some.compile(DIGITS) for _ in range(3))
    for each in (*others, undisturbed):
        assert not each.completes(text[0])
    for token in text:
        if allowed(hostile, (), 0, 1).any():
            assert not hostile.completes(token)
    assert isinstance(hostile.failure, FieldError)
    expected = allowed(undisturbed, (), 0, 1)
    for other in others:
        assert np.array_equal(allowed(other, (), 0, 1), expected)
        assert not other.completes(text[1])
        assert other.failure is None
    assert some.compile(DIGITS).allowed((), 0, 1).any()


def test_texts_that_fill_the_states_of_their_grammar_together_all_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grammar, "_LIMITS", LLParserLimits(max_lexer_states=60))
    source = GrammarSource("regex", r"([a-z]{12}|[0-9]{12}|[A-Z]{12})")
    some = GrammarCompiler(tokenizer())
    texts = {digit * 12: some.compile(source) for digit in "az09AZ"}
    for text, found in texts.items():
        for token in ids(text)[:-1]:
            assert allowed(found, (), 0, 1)[0, token]
            assert not found.completes(token)
        assert found.failure is None, found.failure


def test_tokens_that_are_proposed_and_rejected_do_not_make_a_text_too_complex() -> None:
    source = GrammarSource("regex", ".*a.{15}")
    found = GrammarCompiler(tokenizer()).compile(source)
    draw = random.Random(0)
    letters = [ids(text)[0] for text in "ab"]
    for _ in range(80):
        chosen = draw.choice(letters)
        rejected = letters[chosen == letters[0]]
        proposed = [rejected, *draw.choices(letters, k=5)]
        allowed_CV = allowed(found, proposed, 0, 7)
        assert found.failure is None, found.failure
        assert allowed_CV[0, chosen]
        assert not found.completes(chosen)


def test_a_text_fails_only_if_it_gets_to_the_proposed_token_that_is_too_complex(
    digits_are_complex: list[TokenId],
) -> None:
    text, num_right = digits_are_complex, 0
    rejected, accepted = (GrammarCompiler(tokenizer()).compile(DIGITS) for _ in range(2))
    for found in (rejected, accepted):
        num_right = int(allowed(found, text, 0, len(text) + 1).any(axis=1).sum())
        assert 1 < num_right < len(text)
        assert (found.failure, found.may_look_ahead) == (None, False)
    assert not rejected.completes(text[0])
    undisturbed = GrammarCompiler(tokenizer()).compile(DIGITS)
    assert not undisturbed.completes(text[0])
    assert np.array_equal(allowed(rejected, (), 0, 1), allowed(undisturbed, (), 0, 1))
    assert rejected.failure is None
    for token in text[:num_right]:
        assert accepted.failure is None
        assert not accepted.completes(token)
    assert f"too complex after {num_right} tokens" in str(accepted.failure)


def test_structure_of_a_model_without_an_end_of_text_is_refused() -> None:
    endless = SimpleNamespace(
        definition=tokenizer().definition, vocab_size=tokenizer().vocab_size, eos_token_ids=()
    )
    with pytest.raises(FieldError, match="no end of text"):
        GrammarCompiler(cast(Tokenizer, endless)).compile(NUMBER)


def test_grammars_are_compiled_again_for_a_limited_share_of_the_time() -> None:
    now = 0.0

    def pass_a_second() -> float:
        nonlocal now
        now += 1.0
        return now

    some = GrammarCompiler(tokenizer(), pass_a_second)
    assert some.compile_again(NUMBER, is_shared=False) is not None
    assert some.compile_again(NUMBER, is_shared=False) is None
    now += 1.0 / grammar.AGAIN_SHARE
    assert some.compile_again(NUMBER, is_shared=False) is not None


def test_a_text_ends_if_its_grammar_cannot_be_compiled_again_now(
    digits_are_complex: list[TokenId], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "MAX_AGAIN_SECONDS", -1.0)
    text, some = digits_are_complex, GrammarCompiler(tokenizer())
    hostile, other = (some.compile(DIGITS) for _ in range(2))
    allowed(hostile, text, 0, len(text) + 1)
    assert not allowed(other, (), 0, 1).any()
    assert isinstance(other.failure, FieldError)


def test_white_space_cannot_fill_a_json_text() -> None:
    found = compiler().compile(PERSON)
    for token in ids('{ "name" : "bob" ,'):
        assert allowed(found, (), 0, 1)[0, token]
        found.completes(token)
    (space,) = ids(" ")
    assert not found.completes(space)
    assert allowed_texts(found) <= {'"', '"a', '"age', '"ag'}


def test_a_tokenizer_that_the_library_does_not_read_is_named() -> None:
    with pytest.raises(FieldError, match="tokenizer of this model"):
        GrammarCompiler(ByteTokenizer()).compile(NUMBER)


def test_the_newest_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_CACHED", 2)
    some = GrammarCompiler(tokenizer())
    sources = [GrammarSource("regex", text) for text in ("a", "b", "c")]
    some.compile(sources[0])
    some.compile(sources[1])
    assert some.cached(sources[0]) is not None
    some.compile(sources[2])
    assert [some.cached(each) is not None for each in sources] == [True, False, True]

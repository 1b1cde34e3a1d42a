"""Structured output: which tokens continue a text with a JSON schema or a regular expression.

*Decision*: llguidance. *Because*: one wheel of 3 MB without dependencies for every Python on x86-64
and ARM; it reads ``tokenizer.json``, masks a vocabulary of 128k in 50 us without preparing all
states of a grammar, and bounds its work by limits. *Not chosen*: xgrammar, which needs
transformers, pydantic, triton and apache-tvm-ffi, and prepares the masks of a grammar in up to
seconds. *Revisit when* masks take a noticeable part of a round.

Letters: C columns of a round, V token ids of the tokenizer.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import ArrayLike, NDArray

from ssd.errors import FieldError
from ssd.ports import Tokenizer
from ssd.text.endless_schema import endless_place
from ssd.types import TokenId

MAX_CACHED = 32
"""Compiled grammars that a process keeps; the least recently used one is dropped."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=10_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""Work and memory of a grammar: some hundred milliseconds to compile it, some milliseconds for a
mask, at most 20 MB of states, which the texts of the grammar share."""
AGAIN_SHARE = 0.02
"""Share of the time that the step thread may spend on compiling grammars again."""
MAX_AGAIN_SECONDS = 0.5
"""Time beyond ``AGAIN_SHARE`` after which no grammar is compiled again for a while."""
WHITE_SPACE = "[ ]?"
"""White space of JSON: at most one space where JSON allows some, so that it cannot fill a text. A
schema changes it with the library's keyword ``x-guidance``."""
_MAX_MESSAGE = 300
_MAX_INTEGER = 2**53 - 1
"""Largest integer of a schema. The library rounds larger ones to float64, and its texts with them:
also a bound of 2^53 that excludes itself."""
_NARROWEST = {
    **dict.fromkeys(("minimum", "exclusiveMinimum"), -_MAX_INTEGER),
    **dict.fromkeys(("maximum", "exclusiveMaximum"), _MAX_INTEGER),
}
"""What replaces a wider bound, as of 64-bit types: fewer texts, which all satisfy the schema."""
_BOUNDS = frozenset({*_NARROWEST, "multipleOf", "const", "enum"})
"""Keywords of a schema that compare numbers."""
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value has schemas by name; the names are no keywords."""
_NOTES = frozenset({"default", "examples"})
"""Keywords whose value is no schema and has no effect."""
_PLAIN: tuple[tuple[str, str], ...] = (
    (r'^at \d+\(\d+\): invalid regex ".*" \(in regex\): ', ""),
    (r" \d+ \| start: .*$", ""),
    (r"^regex parse error: .*\berror: ", ""),
    (
        r"^lookarounds not supported yet; .* in regex ",
        "boundaries of lines and words are not supported: ",
    ),
    (r"^(NoExtension(Bias)?|Unsatisfiable schema: Regex is empty: .*)$", "no text satisfies it"),
    (r"^Unsatisfiable schema: ", "no text satisfies it: "),
    (r"^Unimplemented keys: ", "keywords that are not supported: "),
    (r"^(initial )?lexer (error|configuration)\b:?", "limit of complexity:"),
    (r"^recursion limit exceeded\b", "it is nested too deeply"),
    (r"Enable 'coerce_one_of' option to approximate oneOf with anyOf", "use anyOf"),
)
"""Messages of the library, and what replaces them."""
Bools = NDArray[np.bool_]
Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """The text of a grammar, and the field that contains it."""

    kind: Literal["json_schema", "regex"]
    text: str

    @property
    def field(self) -> str:
        """Path of the field."""
        return f"sampling.{self.kind}"


@dataclass(slots=True)
class _Compiled:
    """A compiled grammar. The texts that use it share its states, as copies of a matcher do."""

    matcher: LLMatcher
    """Matcher at the start of a text."""
    num_texts: int = field(default=0, init=False)
    """Texts that have used its states."""
    is_spent: bool = field(default=False, init=False)
    """Whether one of the texts has exceeded a limit. The library then refuses its states to all."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the newest ones.

    ``compile`` takes milliseconds, for large schemas half a second, and reads the tokenizer when it
    is first called. Any thread.
    """

    def __init__(self, tokenizer: Tokenizer, now: Callable[[], float] = time.monotonic) -> None:
        """Construct; ``now`` returns seconds."""
        self._tokenizer = tokenizer
        self._now = now
        self._again_seconds = 0.0
        """Time of ``compile_again`` that ``AGAIN_SHARE`` has not yet paid for."""
        self._again_at = now()
        self.vocab_size = tokenizer.vocab_size
        self._reader: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._grammars: OrderedDict[GrammarSource, _Compiled] = OrderedDict()

    def cached(self, source: GrammarSource) -> "Grammar | None":
        """Return the grammar at the start of a text, or None if it is not compiled."""
        with self._lock:
            compiled = self._grammars.get(source)
            if compiled is None:
                return None
            self._grammars.move_to_end(source)
        return Grammar(self, source, compiled)

    def compile(self, source: GrammarSource) -> "Grammar":
        """Compile a grammar; return it at the start of a text.

        Raises:
            FieldError: it is malformed, too complex, or allows no text.
        """
        return Grammar(self, source, self.shared(source))

    def compile_again(self, source: GrammarSource, *, is_shared: bool) -> _Compiled | None:
        """Return a grammar for a text in progress; None if it cannot be compiled now. Step thread.

        All streams wait meanwhile. A client could cause this again and again, so its time has a
        limit.
        """
        if is_shared:
            with self._lock:
                compiled = self._grammars.get(source)
            if compiled is not None:
                return compiled
        began_at = self._now()
        earned = AGAIN_SHARE * (began_at - self._again_at)
        self._again_seconds = max(0.0, self._again_seconds - earned)
        self._again_at = began_at
        if self._again_seconds > MAX_AGAIN_SECONDS:
            return None
        try:
            return self.shared(source) if is_shared else self._compiled(source)
        except FieldError:
            return None
        finally:
            self._again_seconds += self._now() - began_at

    def shared(self, source: GrammarSource) -> _Compiled:
        """Return a grammar that texts share; raises as ``compile``."""
        with self._lock:
            compiled = self._grammars.get(source)
        if compiled is None:
            compiled = self._compiled(source)
            with self._lock:
                self._grammars[source] = compiled
                while len(self._grammars) > MAX_CACHED:
                    self._grammars.popitem(last=False)
        return compiled

    def drop(self, source: GrammarSource, compiled: _Compiled) -> None:
        """Compile a grammar again when it is next used. Any thread."""
        with self._lock:
            if self._grammars.get(source) is compiled:
                del self._grammars[source]

    def for_text(self, compiled: _Compiled) -> LLMatcher:
        """Return a matcher at the start of one more text of a grammar. Any thread."""
        with self._lock:
            compiled.num_texts += 1
        return compiled.matcher.deep_copy()

    def _compiled(self, source: GrammarSource) -> _Compiled:
        """Compile a grammar whose states no other text uses; raises as ``compile``."""
        if source.kind == "json_schema":
            grammar = _json_grammar(source)
        else:
            grammar = LLMatcher.grammar_from_regex(source.text)
        matcher = LLMatcher(self._reader_of_tokens(source), grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # The first mask prepares the states that each text begins with. Many grammars that are
            # too complex fail after it.
            bits = np.unpackbits(
                np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"
            )
            if matcher.try_consume_tokens(np.flatnonzero(bits)[:1].tolist()):
                matcher.rollback(1)
        if matcher.is_error():
            raise FieldError(source.field, f"cannot be used: {plain(matcher.get_error())}")
        if source.kind == "json_schema":
            _check_ends(source)
        return _Compiled(matcher)

    def _reader_of_tokens(self, source: GrammarSource) -> LLTokenizer:
        if self._reader is None:
            definition, vocab_size = self._tokenizer.definition, self._tokenizer.vocab_size
            ends = sorted(self._tokenizer.eos_token_ids)
            if not ends:
                raise FieldError(source.field, "is not supported: this model has no end of text")
            try:
                self._reader = LLTokenizer(definition, max(vocab_size, ends[-1] + 1), ends)
            except ValueError as error:
                raise FieldError(
                    source.field,
                    f"is not supported for the tokenizer of this model: {_line(str(error))}",
                ) from error
        return self._reader


class Grammar:
    """A grammar at a position of one text. Step thread only.

    It advances in ``completes``, which receives every token of the text once, in order.
    """

    def __init__(
        self, compiler: GrammarCompiler, source: GrammarSource, compiled: _Compiled
    ) -> None:
        """Construct; the compiler compiles the grammar again if its states are spent."""
        self._compiler = compiler
        self._source = source
        self.vocab_size = compiler.vocab_size
        self._num_words = -(-compiler.vocab_size // 32)
        self._tokens: list[TokenId] = []
        self._has_looked_ahead = False
        """Whether states after proposed tokens count against the limits of the matcher."""
        self._failure: FieldError | None = None
        self._tokens_ahead: list[TokenId] = []
        self._num_before = 0
        """Tokens of the text at the failure, which is that of the text with the tokens ahead."""
        self.may_look_ahead = True
        """False after a failure behind proposed tokens: each further one could compile again."""
        self._use(compiled)

    @property
    def failure(self) -> FieldError | None:
        """Why no token is allowed any more: the grammar has become too complex for this text."""
        if self._failure is None or self._tokens[self._num_before :] != self._tokens_ahead:
            return None
        return self._failure

    def completes(self, token_id: TokenId) -> bool:
        """Add the next token; true if nothing but the end of the text can follow."""
        while self.failure is None:
            if self._matcher.consume_token(token_id):
                self._tokens.append(token_id)
                return self._matcher.is_stopped()
            if not self._recovers():
                self._fail()
        return False

    def allowed(self, proposed: Sequence[TokenId], first_column: int, num_columns: int) -> Words:
        """Return which tokens are allowed at some columns of a round; see ``packed_ids``.

        After a proposed token that is not allowed, or that ends the text, all are: no round reads
        these columns. After the grammar is too complex, none is; the text fails only if it gets
        there. The position does not change.

        Args:
            proposed: tokens that the columns of the round follow; column c follows c of them.
            first_column: of the result; 0 is the column after the text.
            num_columns: C.

        Returns:
            int32 [C, W]. Bits from the size of the vocabulary on are any.
        """
        while self.failure is None:
            bits_CW, num_right = self._masks(proposed, first_column, num_columns)
            if not self._matcher.is_error():
                self._has_looked_ahead |= num_columns > 1
                return bits_CW
            if not self._recovers():
                self._fail(proposed[: first_column + num_right])
                # The columns before the failure are right, and a round may end at one of them.
                bits_CW[num_right:] = 0
                return bits_CW
        return np.zeros((num_columns, self._num_words), dtype=np.int32)

    def _masks(
        self, proposed: Sequence[TokenId], first_column: int, num_columns: int
    ) -> tuple[Words, int]:
        """Return the masks of some columns, int32 [C, W], and how many are right."""
        matcher = self._matcher
        bits_CW = np.full((num_columns, self._num_words), -1, dtype=np.int32)
        num_taken, num_right = self._take(proposed[:first_column]), 0
        if num_taken == first_column:
            for row_W, following in zip(bits_CW, [*proposed[first_column:], None], strict=False):
                matcher.unsafe_compute_mask_ptr(row_W.ctypes.data, row_W.nbytes)
                num_right += not matcher.is_error()
                if following is None or not self._take([following]):
                    break
                num_taken += 1
        if not matcher.is_error():
            matcher.rollback(num_taken)
        return bits_CW, num_right

    def _take(self, token_ids: Sequence[TokenId]) -> int:
        """Advance over tokens while they are allowed; return how many are."""
        return self._matcher.try_consume_tokens(list(token_ids)) if token_ids else 0

    def _use(self, compiled: _Compiled) -> bool:
        """Continue with the states of a grammar; false if it refuses the tokens of the text."""
        self._compiled = compiled
        self._matcher = self._compiler.for_text(compiled)
        return self._take(self._tokens) == len(self._tokens) and not self._matcher.is_error()

    def _recovers(self) -> bool:
        """Continue with new states if the states of the text alone have not reached a limit.

        States of other texts and after proposed tokens count too. False if the text alone exceeds
        the limit, or if the grammar cannot be compiled now.
        """
        spent = self._compiled
        if spent.num_texts == 1 and not self._has_looked_ahead:
            return False
        self._has_looked_ahead = False
        was_spent, spent.is_spent = spent.is_spent, True
        self._compiler.drop(self._source, spent)
        # The text that reaches the limit continues without others, to which it could do it again.
        compiled = self._compiler.compile_again(self._source, is_shared=was_spent)
        return compiled is not None and (self._use(compiled) or self._recovers())

    def _fail(self, ahead: Sequence[TokenId] = ()) -> None:
        """Set the failure of the text with these proposed tokens; another text continues."""
        self._compiler.drop(self._source, self._compiled)
        if ahead:
            # The states after these tokens have reached the limit, perhaps not those of the text.
            self._has_looked_ahead, self.may_look_ahead = True, False
        self._tokens_ahead, self._num_before = list(ahead), len(self._tokens)
        length, cause = self._num_before + len(ahead), plain(self._matcher.get_error())
        self._failure = FieldError(
            self._source.field, f"is too complex after {length} tokens of text: {cause}"
        )


def packed_ids(token_ids: ArrayLike, num_ids: int) -> Words:
    """Return a set of token ids as bits: id i is bit i % 32 of word i // 32, int32 [W]."""
    is_in_set = np.zeros(-(-num_ids // 32) * 32, dtype=np.bool_)
    is_in_set[np.asarray(token_ids, dtype=np.int64)] = True
    return np.packbits(is_in_set, bitorder="little").view(np.int32)


def unpacked_ids(bits_CW: Words, num_ids: int) -> Bools:
    """Return whether each id is in each set, bool [C, num_ids]; ids beyond the words are not."""
    bits_CV = np.unpackbits(bits_CW.view(np.uint8), axis=1, count=num_ids, bitorder="little")
    return bits_CV.view(np.bool_)


def checked_json(source: GrammarSource) -> dict[str, object] | bool:
    """Return a schema, which is a JSON object or a truth value.

    Raises:
        FieldError: it is not.
    """
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise FieldError(source.field, f"is not JSON: {_line(str(error))}") from error
    if not isinstance(schema, dict | bool):
        raise FieldError(source.field, f"is a JSON {type(schema).__name__}, must be an object")
    return schema


def _check_ends(source: GrammarSource) -> None:
    """Refuse a schema whose texts never end; raises as ``compile``."""
    schema = checked_json(source)
    place = endless_place(schema) if isinstance(schema, dict) else None
    if place is not None:
        raise FieldError(
            source.field,
            "cannot be used: no finite text satisfies it: each text of "
            f"{_line(place)} contains another one; make a property or an item optional",
        )


def _json_grammar(source: GrammarSource) -> str:
    """Return the library's form of a schema; raises as ``compile``."""
    schema = checked_json(source)
    if schema is False:
        raise FieldError(source.field, "cannot be used: no text satisfies it: schema is false")
    is_narrowed = False
    for place, keyword in _bounds(schema):
        value, narrowest = place[keyword], _NARROWEST.get(keyword, 0)
        if isinstance(value, int) and abs(value) > _MAX_INTEGER and value * narrowest > 0:
            place[keyword], is_narrowed = narrowest, True
        for number in _integers(place[keyword]):
            if abs(number) > _MAX_INTEGER:
                raise FieldError(
                    source.field,
                    f"cannot be used: {keyword} has {str(number)[:40]}, integers must be in "
                    f"{-_MAX_INTEGER}..{_MAX_INTEGER}; use a string",
                )
    text = json.dumps(schema) if is_narrowed else source.text
    # The library adds its options to an object.
    text = "{}" if schema is True else text
    try:
        return LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": WHITE_SPACE}
        )
    except ValueError as error:
        raise FieldError(source.field, f"cannot be used: {plain(str(error))}") from error


def _bounds(schema: object) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the places of a schema whose texts are compared with numbers, with their keywords."""
    waiting = [schema]
    while waiting:
        place = waiting.pop()
        if isinstance(place, list):
            waiting.extend(place)
        elif isinstance(place, dict):
            for keyword, value in place.items():
                if keyword in _BOUNDS:
                    yield place, keyword
                elif keyword in _MAPS and isinstance(value, dict):
                    waiting.extend(value.values())
                elif keyword not in _NOTES:
                    waiting.append(value)


def _integers(value: object) -> Iterator[int]:
    """Yield the integers in a JSON value."""
    waiting = [value]
    while waiting:
        place = waiting.pop()
        if isinstance(place, int):
            yield place
        elif isinstance(place, list):
            waiting.extend(place)
        elif isinstance(place, dict):
            waiting.extend(place.values())


def plain(message: str) -> str:
    """Return the first characters of a message of the library, on one line, in plain words."""
    line = _line(message)
    for pattern, replacement in _PLAIN:
        line = re.sub(pattern, replacement, line)
    return line


def _line(message: str) -> str:
    """Return the first characters of a message of the library, on one line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:_MAX_MESSAGE]

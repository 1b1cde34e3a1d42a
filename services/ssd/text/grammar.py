"""Structured output: which tokens continue a text with a JSON schema or a regular expression.

*Decision*: llguidance. *Because*: one wheel of 3 MB without dependencies for every Python on x86-64
and ARM; it reads ``tokenizer.json``, masks a vocabulary of 128k in 50 us without preparing all
states of a grammar, and bounds its work by limits. *Not chosen*: xgrammar, which needs
transformers, pydantic, triton and apache-tvm-ffi, and prepares the masks of a grammar in up to
seconds. *Revisit when* masks take a noticeable part of a round.

Letters: C columns of a round, V token ids of the tokenizer.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from ssd.errors import FieldError, OverloadedError
from ssd.ports import Tokenizer
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
mask, at most 20 MB of states, which all texts of the grammar share."""
_MAX_MESSAGE = 300
Bools = NDArray[np.bool_]


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
    """A compiled grammar. The texts that use it share its states."""

    matcher: LLMatcher
    """At the start of a text."""
    is_spent: bool = field(default=False, init=False)
    """Whether one of the texts has exceeded a limit, after which none can use it."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the newest ones.

    ``compile`` takes milliseconds, for large schemas half a second, and reads the tokenizer when it
    is first called. One thread at a time; ``cached`` from any thread.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
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
            return self._at_start(source, compiled)

    def compile(self, source: GrammarSource) -> "Grammar":
        """Compile a grammar; return it at the start of a text.

        Raises:
            FieldError: it is malformed, too complex, or allows no text.
        """
        found = self.cached(source)
        if found is None:
            compiled = _Compiled(self._compiled(source))
            with self._lock:
                self._grammars[source] = compiled
                while len(self._grammars) > MAX_CACHED:
                    self._grammars.popitem(last=False)
            found = self._at_start(source, compiled)
        return found

    def forget(self, source: GrammarSource) -> None:
        """Compile a grammar again when it is next used. Any thread."""
        with self._lock:
            self._grammars.pop(source, None)

    def _at_start(self, source: GrammarSource, compiled: _Compiled) -> "Grammar":
        forget = partial(self.forget, source)
        return Grammar(source, compiled, self._tokenizer.vocab_size, forget)

    def _compiled(self, source: GrammarSource) -> LLMatcher:
        if source.kind == "json_schema":
            check_json(source)
            grammar = LLMatcher.grammar_from_json_schema(source.text)
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
            raise FieldError(source.field, f"cannot be used: {_line(matcher.get_error())}")
        return matcher

    def _reader_of_tokens(self, source: GrammarSource) -> LLTokenizer:
        if self._reader is None:
            definition, vocab_size = self._tokenizer.definition, self._tokenizer.vocab_size
            # Without an end of text, an id that no text has.
            ends = sorted(self._tokenizer.eos_token_ids) or [vocab_size]
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
        self,
        source: GrammarSource,
        compiled: _Compiled,
        vocab_size: int,
        forget: Callable[[], None],
    ) -> None:
        """Construct; ``forget`` is called when the grammar has become too complex."""
        self._source = source
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._vocab_size = vocab_size
        self._forget = forget
        self._num_tokens = 0
        self.failure: FieldError | OverloadedError | None = None
        """Why no token is allowed any more: the grammar has become too complex for this text, or
        for another one, after which this request can be sent again."""

    def completes(self, token_id: TokenId) -> bool:
        """Add the next token; true if nothing but the end of the text can follow."""
        self._num_tokens += 1
        if self._matcher.consume_token(token_id):
            return self._matcher.is_stopped()
        self._note_failure()
        return False

    def allowed(self, proposed: Sequence[TokenId], first_column: int, num_columns: int) -> Bools:
        """Return which tokens are allowed at some columns of a round, bool [C, V].

        After a proposed token that is not allowed, or that ends the text, all are: no round reads
        these columns. None is once the grammar is too complex. The position does not change.

        Args:
            proposed: tokens that the columns of the round follow; column c follows c of them.
            first_column: of the result; 0 is the column after the text.
            num_columns: C.
        """
        if self.failure is not None:
            return np.zeros((num_columns, self._vocab_size), dtype=np.bool_)
        matcher = self._matcher
        bits_CW = np.full((num_columns, -(-self._vocab_size // 32)), -1, dtype=np.int32)
        num_taken, num_right = self._take(proposed[:first_column]), 0
        if num_taken == first_column:
            for row_W, following in zip(bits_CW, [*proposed[first_column:], None], strict=False):
                matcher.unsafe_compute_mask_ptr(row_W.ctypes.data, row_W.nbytes)
                num_right += not matcher.is_error()
                if following is None or not self._take([following]):
                    break
                num_taken += 1
        if matcher.is_error():
            bits_CW[num_right:] = 0
            self._note_failure()
        else:
            matcher.rollback(num_taken)
        bits = np.unpackbits(bits_CW.view(np.uint8), axis=1, bitorder="little")
        return bits[:, : self._vocab_size].astype(np.bool_)

    def _take(self, token_ids: Sequence[TokenId]) -> int:
        """Advance over tokens while they are allowed; return how many are."""
        return self._matcher.try_consume_tokens(list(token_ids)) if token_ids else 0

    def _note_failure(self) -> None:
        if self._compiled.is_spent:
            self.failure = OverloadedError(
                f"{self._source.field} has become too complex for the text of another request; "
                "send the request again"
            )
            return
        self._compiled.is_spent = True
        cause = _line(self._matcher.get_error())
        self.failure = FieldError(
            self._source.field, f"is too complex after {self._num_tokens} tokens of text: {cause}"
        )
        self._forget()


def check_json(source: GrammarSource) -> None:
    """Check that a schema is a JSON object or a truth value.

    Raises:
        FieldError: it is not.
    """
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError) as error:
        raise FieldError(source.field, f"is not JSON: {_line(str(error))}") from error
    if not isinstance(schema, dict | bool):
        raise FieldError(source.field, f"is a JSON {type(schema).__name__}, must be an object")


def _line(message: str) -> str:
    """Return the first characters of a message of the library, on one line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:_MAX_MESSAGE]

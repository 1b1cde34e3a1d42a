"""Token ids to text: whole characters for the writers, stop strings for the step thread.

Both sides run the same two classes over the same tokens, so they agree on where a text ends: the
step thread ends the sequence at the token that completes a stop string, the writer ends the text
before that string.
"""

from collections.abc import Sequence as Tokens

from ssd.ports import Tokenizer
from ssd.text.detokenizer import IncrementalDetokenizer
from ssd.text.stop import StopStrings
from ssd.types import TokenId


class TextWriter:
    """Text of one continuation, a piece at a time. Belongs to one task or thread."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopStrings(stop)
        self._has_stops = bool(stop)

    def push(self, token_ids: Tokens[TokenId]) -> str:
        """Text that has become certain: whole characters that no stop string can still claim."""
        if not self._has_stops:
            return self._detokenizer.push(token_ids)
        # One by one, as the step thread saw them: where a stop string is complete depends on it.
        pieces = [self._stop.push(self._detokenizer.push([token_id])) for token_id in token_ids]
        return "".join(pieces)

    def finish(self) -> str:
        """The rest: nothing after a stop string, else all that was held back."""
        return self._stop.push(self._detokenizer.finish()) + self._stop.finish()


class StopStringWatch:
    """Sees at which token a stop string is complete. Step thread only."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopStrings(stop)

    def completes(self, token_id: TokenId) -> bool:
        """Take the next token; true if the text now contains a stop string."""
        self._stop.push(self._detokenizer.push([token_id]))
        return self._stop.is_complete

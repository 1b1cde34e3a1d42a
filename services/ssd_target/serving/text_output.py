"""Token ids to text, for the streams and for the stop strings of the step thread.

Both process the same tokens with the same two classes, so they find the same end: the step thread
ends the sequence at the token that completes a stop string, the writer ends the text before that
string.
"""

from collections.abc import Sequence as Tokens

from ssd.ports import Tokenizer
from ssd.text.detokenizer import REPLACEMENT, IncrementalDetokenizer
from ssd.text.stop import StopStrings
from ssd.types import GenerationChunk, TokenId


class TextWriter:
    """Returns the text of one continuation in pieces. Belongs to one task or thread."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopStrings(stop)
        self._has_stops = bool(stop)

    def push(self, token_ids: Tokens[TokenId]) -> str:
        """Add tokens; return complete characters that cannot be part of a stop string."""
        if not self._has_stops:
            return self._detokenizer.push(token_ids)
        # One by one, as on the step thread: the position of a complete stop string depends on it.
        pieces = [self._stop.push(self._detokenizer.push([token_id])) for token_id in token_ids]
        return "".join(pieces)

    def finish(self) -> str:
        """Return the held-back text; empty after a stop string."""
        return self._stop.push(self._detokenizer.finish()) + self._stop.finish()


class StopStringDetector:
    """Finds the token at which a stop string is complete. Step thread only."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = StopStrings(stop)

    def completes(self, token_id: TokenId) -> bool:
        """Add the next token; true if the text now contains a stop string."""
        self._stop.push(self._detokenizer.push([token_id]))
        return self._stop.is_complete


def add_texts(chunk: GenerationChunk, tokenizer: Tokenizer) -> None:
    """Set the texts of the single tokens of a chunk, in its rounds and log-probabilities."""
    for each in chunk.rounds:
        for token in (*each.proposed, *each.added):
            token.text = tokenizer.decode([token.id])
    for position in chunk.logprobs:
        for found in (position.selected, *position.top):
            found.text = tokenizer.decode([found.token_id])
            if REPLACEMENT in found.text:
                found.partial = tokenizer.token_bytes(found.token_id)

"""When a sequence reached the phases of its request."""

from dataclasses import dataclass


@dataclass(slots=True)
class RequestTimes:
    """Times of the clock in seconds; 0 before the phase.

    The step thread writes each of them once; the asyncio loop reads them.
    """

    admitted_at: float = 0.0
    """It left the queue. A sequence that is preempted and admitted again keeps its first time."""
    decoding_at: float = 0.0
    """Its first round began: the prompt is stored."""
    first_token_at: float = 0.0
    """Its first token was chosen."""

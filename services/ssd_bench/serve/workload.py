"""The requests of a load: request ``i`` is a function of ``i``."""

from collections.abc import Sequence
from dataclasses import dataclass

from ssd.rpc.codec import GenerateCall
from ssd.types import Mode, SamplingParams, TokenId


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts and parameters of the requests."""

    prompts: Sequence[str]
    max_tokens: int
    """Maximum number of new tokens. Requests have between half of it and all of it, so that streams
    that start together do not end together."""
    temperature: float = 0.0
    mode: Mode = Mode.AUTO

    def call(self, index: int) -> GenerateCall:
        """Return request ``index``. No two prompts begin alike, so the prefix cache has no part."""
        prompt = self.prompts[index % len(self.prompts)]
        half = self.max_tokens // 2
        return GenerateCall(
            prompt=f"# {index}\n{prompt}",
            sampling=SamplingParams(
                temperature=self.temperature,
                ignore_eos=True,
                seed=index,
                max_tokens=self.max_tokens - (index * 37) % (half + 1),
            ),
            mode=self.mode,
        )


def call_with_ids(token_ids: tuple[TokenId, ...], max_tokens: int, mode: Mode) -> GenerateCall:
    """Return a request whose prompt has an exact length."""
    return GenerateCall(
        prompt=token_ids,
        sampling=SamplingParams(temperature=0.0, ignore_eos=True, seed=0, max_tokens=max_tokens),
        mode=mode,
    )

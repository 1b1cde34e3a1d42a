"""What is compared: a row of the result is one contender."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16", "int8"]
Drafting = Literal["none", "draft", "ngram", "ssd"]
"""Plain decoding; a draft model on the target's CPUs; n-grams of the text; drafts of this product
on a CPU of their own."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Contender:
    """An engine with its settings."""

    peer: str
    """``ssd`` or the name of an environment."""
    drafting: Drafting = "none"
    lookahead: int = 0
    """Tokens of a proposal; 0 without proposals."""
    threads: int = 1
    """CPUs of the target."""
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Unique, for tables and files."""
        method = {
            "none": "plain",
            "draft": f"draft model, K={self.lookahead}",
            "ngram": f"n-grams, K={self.lookahead}",
            "ssd": f"SSD, K={self.lookahead}",
        }[self.drafting]
        cpus = f"{self.threads} + 1" if self.drafting == "ssd" else f"{self.threads}"
        return f"{self.peer}, {method}, {self.dtype}, {cpus} CPUs"


@dataclass(frozen=True, slots=True)
class Peer:
    """What an engine offers."""

    dtypes: tuple[Dtype, ...]
    drafting: tuple[Drafting, ...]
    drafting_batch: int = 16
    """Most prompts at a time with a draft."""


PEERS = {
    "ssd": Peer(("float32", "bfloat16", "int8"), ("none", "draft", "ssd")),
    "openvino-genai": Peer(("float32", "bfloat16", "int8"), ("none", "draft")),
    "transformers": Peer(("float32", "bfloat16"), ("none", "draft"), drafting_batch=1),
    "vllm": Peer(("float32", "bfloat16"), ("none", "ngram", "draft", "ssd")),
}


def contenders(
    peers: Sequence[str],
    *,
    dtypes: Sequence[str],
    lookaheads: Sequence[int],
    threads: Sequence[int],
    ssd_lookahead: int,
) -> list[Contender]:
    """Return all contenders that the peers offer, in the order of the arguments.

    Args:
        peers: names of ``PEERS``.
        dtypes: of ``Dtype``.
        lookaheads: for drafts on the target's CPUs.
        threads: numbers of CPUs of a target; SSD uses one, and another one for its draft.
        ssd_lookahead: for drafts of this product.
    """

    def offered() -> Iterator[Contender]:
        for peer in peers:
            for dtype in dtypes:
                if dtype not in PEERS[peer].dtypes:
                    continue
                for drafting in PEERS[peer].drafting:
                    if drafting == "ssd":
                        yield Contender(
                            peer=peer, drafting="ssd", lookahead=ssd_lookahead, dtype=dtype
                        )
                        continue
                    for count in threads:
                        for lookahead in (0,) if drafting == "none" else lookaheads:
                            yield Contender(
                                peer=peer,
                                drafting=drafting,
                                lookahead=lookahead,
                                threads=count,
                                dtype=dtype,
                            )

    return list(offered())

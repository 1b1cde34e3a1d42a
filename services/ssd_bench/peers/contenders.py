"""What is compared: a row of the result is one contender."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16", "int8", "int4"]
Drafting = Literal["none", "draft", "ngram", "ssd", "server"]
"""Plain decoding; a draft model on the target's CPUs; n-grams of the text; drafts of this product
on a CPU of their own; what a server does that runs already."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Contender:
    """An engine with its settings."""

    peer: str
    """One of ``PEERS``, or the name of a server."""
    drafting: Drafting = "none"
    lookahead: int = 0
    """Tokens of a proposal; 0 without proposals."""
    threads: int = 1
    """CPUs of the target."""
    dtype: str = "float32"

    @property
    def name(self) -> str:
        """Unique, for tables and files."""
        if self.drafting == "server":
            return f"{self.peer}, a server"
        method = {
            "none": "plain",
            "draft": f"draft model, K={self.lookahead}",
            "ngram": f"n-grams, K={self.lookahead}",
            "ssd": f"SSD, K={self.lookahead}",
        }[self.drafting]
        unit = "" if self.needs_cuda else " CPU" if self.devices == "1" else " CPUs"
        return f"{self.peer}, {method}, {self.dtype}, {self.devices}{unit}"

    @property
    def needs_cuda(self) -> bool:
        """Whether it runs on GPUs instead of CPUs."""
        return self.peer in PEERS and PEERS[self.peer].needs_cuda

    @property
    def devices(self) -> str:
        """How many CPUs, or GPUs, target and draft use; empty if this is not known."""
        count = f"{self.threads} + 1" if self.drafting == "ssd" else f"{self.threads or ''}"
        return f"{count} GPU" if self.needs_cuda else count


@dataclass(frozen=True, slots=True)
class Peer:
    """What an engine offers."""

    dtypes: tuple[Dtype, ...]
    drafting: tuple[Drafting, ...]
    drafting_batch: int = 16
    """Most prompts at a time with a draft."""
    needs_cuda: bool = False
    """Whether it runs on GPUs instead of CPUs."""


PAPER = "ssd-paper"
"""The engine of the SSD paper's authors."""
OWN_ON_GPUS = "ssd-cuda"
"""This product with its target on one GPU and its draft on another one."""
OWN = ("ssd", OWN_ON_GPUS)
PEERS = {
    "ssd": Peer(("float32", "bfloat16", "int8", "int4"), ("none", "draft", "ssd")),
    "openvino-genai": Peer(("float32", "bfloat16", "int8", "int4"), ("none", "draft")),
    "transformers": Peer(("float32", "bfloat16"), ("none", "draft"), drafting_batch=1),
    "vllm": Peer(("float32", "bfloat16"), ("none", "ngram", "draft", "ssd")),
    OWN_ON_GPUS: Peer(("float32", "bfloat16"), ("none", "draft", "ssd"), needs_cuda=True),
    PAPER: Peer(("bfloat16",), ("none", "draft", "ssd"), needs_cuda=True),
}


def server(name: str) -> Contender:
    """Return the contender of a server that runs already, with settings of its own."""
    return Contender(peer=name, drafting="server", threads=0, dtype="")


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
    lookaheads_of = {"none": (0,), "ssd": (ssd_lookahead,)}
    return [
        Contender(peer=peer, drafting=drafting, lookahead=lookahead, threads=count, dtype=dtype)
        for peer in peers
        for dtype in dtypes
        if dtype in PEERS[peer].dtypes
        for drafting in PEERS[peer].drafting
        for count in ((1,) if drafting == "ssd" or PEERS[peer].needs_cuda else threads)
        for lookahead in lookaheads_of.get(drafting, lookaheads)
    ]

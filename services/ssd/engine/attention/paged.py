"""The interface between a pass on a device and the attention kernels that read pages.

A kernel gets pages, block tables and lengths, and nothing is gathered.
All sizes are static and nothing synchronises with the host, so that a pass can be captured in a
CUDA graph. Letters: Q queries of a sequence, Y pages of the storage, of C slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Protocol, cast

import torch
from torch import Tensor

from ssd.errors import SettingsError

AUTO = "auto"
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attends in one layer of a prepared pass: ``attend(queries_BQHE, keys_YCGE, values_YCGE)``.

Keys and values are the pages of the layer; they may be strided views, except in E. All entries are
finite, those that no query sees included. Query heads of one key/value head are consecutive.

Returns the weighted values [B, Q, H, E] in the dtype of the queries, and the log-sum-exp of the
scaled scores [B, H, Q] (natural logarithm, fp32). A query that sees nothing gets 0 and -inf, or any
infinity in a causal pass.
"""


class PagedAttention(Protocol):
    """Scaled dot-product attention over pages. Step thread only."""

    name: str
    block_size: int
    """C, slots of a page; fixed by the backend, except that the reference takes any."""

    def prepare(
        self,
        block_tables_BJ: Tensor,
        lengths_B: Tensor,
        *,
        num_queries: int,
        num_pages: int,
        is_causal: bool,
    ) -> Attend:
        """Prepare one pass: compute what all of its layers share.

        In a captured pass, this is part of the graph: the tensors may change before each replay.

        Args:
            block_tables_BJ: int32, the pages of each sequence in order. Entries beyond the length
                are page ids that are not read, such as 0.
            lengths_B: int32, positions of each sequence, 0..J*C; 0 for padding. With ``is_causal``,
                the queries' own positions, the Q newest, are included.
            num_queries: Q.
            num_pages: Y.
            is_causal: query i sees positions 0..length-Q+i; else all queries see 0..length-1.
        """


def num_visible(lengths_B: Tensor, num_queries: int, *, is_causal: bool) -> Tensor:
    """Return how many positions each query sees, [B, Q]; negative where a length is below Q."""
    if not is_causal:
        return lengths_B[:, None].expand(-1, num_queries)
    query_Q = torch.arange(1 - num_queries, 1, device=lengths_B.device, dtype=lengths_B.dtype)
    return lengths_B[:, None] + query_Q


PAGED = {
    "flash_attn": "ssd.engine.attention.paged_flash_attn:PagedFlashAttention",
    "flex": "ssd.engine.attention.paged_flex:PagedFlex",
    "reference": "ssd.engine.attention.dense:PagedReference",
}


@dataclass(frozen=True, slots=True)
class PagedChoice:
    """A backend and the reason of its choice."""

    attention: PagedAttention
    reason: str
    """One clause, for logs."""


def make_paged(
    requested: str, device: str, dtype: str, *, head_size: int, is_deterministic: bool = False
) -> PagedChoice:
    """Return the requested backend of ``PAGED``, or for ``auto`` the fastest of the device.

    On ``cpu``, only the reference exists. ``dtype`` is ``bfloat16`` or ``float32``. With
    ``is_deterministic``, the bits of a query depend neither on the lengths of its pass nor on the
    number of sequences.

    Raises:
        SettingsError: the backend does not exist, is not installed, or cannot run with the device,
            the dtype or the head size.
    """
    load = partial(_load, is_deterministic=is_deterministic)
    if requested != AUTO:
        check_paged(requested, device, dtype, head_size)
        try:
            return PagedChoice(load(requested), "set explicitly")
        except (ImportError, OSError) as error:
            cause = f"attention {requested} cannot be imported: {error}"
            raise SettingsError(f"{cause}; set attention to auto, or install it") from error
    if not device.startswith("cuda"):
        return PagedChoice(load("reference"), f"the kernels for pages need CUDA, not {device}")
    problem = _problem("flash_attn", device, dtype, head_size)
    if problem is None:
        try:
            return PagedChoice(load("flash_attn"), "flash-attn is installed")
        except (ImportError, OSError) as error:
            problem = f"it cannot be imported: {error}"
    return PagedChoice(load("flex"), f"not flash_attn: {problem}")


def check_paged(name: str, device: str, dtype: str, head_size: int) -> None:
    """Refuse a backend that cannot run with a device, a dtype and a head size on any machine.

    Whether a package is installed is known only on the machine where the process runs.

    Raises:
        SettingsError: there is no such backend, or the device, the dtype or the head size excludes
            it.
    """
    if name != AUTO and (problem := _problem(name, device, dtype, head_size)) is not None:
        raise SettingsError(f"attention {name}: {problem}; set attention to auto")


def _problem(name: str, device: str, dtype: str, head_size: int) -> str | None:
    if name not in PAGED:
        return f"it is not one of {', '.join((AUTO, *PAGED))}"
    if name == "reference":
        return None
    if not device.startswith("cuda"):
        return f"it runs on CUDA, and the device is {device}"
    if name == "flash_attn" and dtype != "bfloat16":
        return f"it computes in bfloat16, and the dtype is {dtype}"
    if name == "flash_attn" and head_size % 8:
        return f"it would copy all pages in each pass for heads of {head_size}, no multiple of 8"
    return None


def _load(name: str, *, is_deterministic: bool) -> PagedAttention:
    module, _, attribute = PAGED[name].partition(":")
    kind = getattr(import_module(module), attribute)
    # The sums of the reference depend neither on lengths nor on the number of sequences.
    options = {} if name == "reference" else {"is_deterministic": is_deterministic}
    return cast("PagedAttention", kind(**options))

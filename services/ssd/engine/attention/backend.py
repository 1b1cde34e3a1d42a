"""The interface between a forward pass and the attention kernels.

A pass is a set of queries that attend to KV entries under an additive mask. Entries and mask define
whether it is a verify, a prefill, an explicit pass or a step of branches. Letters: Q queries of a
sequence (its columns or branches), U query rows times query heads of a group.
"""

from importlib import import_module
from typing import Protocol, cast

from torch import Tensor

from ssd.errors import SettingsError


class AttentionBackend(Protocol):
    """Scaled dot-product attention that also returns the log-sum-exp. Step thread only."""

    name: str

    def attend(
        self, queries_BGUE: Tensor, keys_BSGE: Tensor, values_BSGE: Tensor, mask_B1US: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attend to S entries.

        Args:
            queries_BGUE: the query rows of each key/value head.
            keys_BSGE: keys of the gathered entries.
            values_BSGE: their values.
            mask_B1US: 0 or -inf, added to the scaled scores; some column of each row is 0.

        Returns:
            The weighted values [B, G, U, E] and the log-sum-exp of the scores [B, G, U] (fp32).
        """
        ...

    def attend_whole(
        self, queries_BGUE: Tensor, keys_BSGE: Tensor, values_BSGE: Tensor, mask_B1US: Tensor
    ) -> Tensor:
        """Attend to the whole context: ``attend`` without the log-sum-exp, in the fastest way.

        For the passes of a draft, whose bits may depend on the batch: a draft only proposes.
        """
        ...


AUTO = "auto"
DEFAULT = "cpu"
BACKENDS = {
    "cpu": "ssd.engine.attention.cpu:FlashCpuAttention",
    "reference": "ssd.engine.attention.reference:ReferenceAttention",
}


def make_backend(name: str) -> AttentionBackend:
    """Return the backend with this name; ``auto`` is ``cpu``.

    Raises:
        SettingsError: there is no such backend.
    """
    if name == AUTO:
        name = DEFAULT
    if name not in BACKENDS:
        raise SettingsError(f"attention: {name!r} is not one of {', '.join(sorted(BACKENDS))}")
    module, _, attribute = BACKENDS[name].partition(":")
    return cast("AttentionBackend", getattr(import_module(module), attribute)())

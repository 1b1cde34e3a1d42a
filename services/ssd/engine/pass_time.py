"""Predicts the time of a forward pass on a GPU from the shape of a model; imported without torch.

A pass reads its weights and the KV entries of its context, multiplies, joins the partial sums of
tensor parallelism, and starts kernels. The first two overlap with the third; the others add:

    time = max(bytes / bandwidth, flops / speed) + all-reduces + kernels

*Decision*: the five constants below are assumptions, the same for all GPUs. *Because*: with them,
predictions are within 15 % of the published speeds on H100s
(``tests/unit/ssd_cli/test_published_speeds.py``). The times of a kernel and of an all-reduce were
chosen for that. *Not chosen*: constants for each GPU, for which there are no measurements here.
*Revisit when* a GPU has been measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ssd.engine.config import DTYPE_BYTES, ModelConfig
from ssd.engine.sizes import bytes_per_entry, has_head_norms, pass_weights

BANDWIDTH_SHARE = 0.9
"""Share of the memory bandwidth that a copy reaches, and large products with few rows too."""
FLOPS_SHARE = 0.6
"""Share of the peak that products of some hundred rows reach."""
LINK_SHARE = 0.5
"""Share of the link bandwidth that all-reduces of a few MB reach."""
KERNEL_SECONDS = 3e-6
"""Fixed time of a kernel in a CUDA graph: its start and its last, partly filled wave."""
ALL_REDUCE_SECONDS = 20e-6
"""Time of a small all-reduce by NCCL in a CUDA graph, waiting for the slowest rank included."""
LAYER_KERNELS = 10
"""Kernels of a layer: 2 norms, 4 products, rotation, 1 that stores KV, attention, activation."""
HEAD_NORM_KERNELS = 2
TREE_KERNELS = 8
"""More kernels of a layer in a step of a draft's tree: two more segments, and their merge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as its public data sheet describes it."""

    name: str
    memory_bytes: int
    """In data sheets, 1 GB is 10^9 bytes or more, so this is a lower bound."""
    bandwidth: float
    """Memory bandwidth, bytes a second."""
    flops: float
    """Dense bfloat16 operations of the tensor cores a second."""
    link_bandwidth: float
    """Of the link to the other GPUs, bytes a second, both directions together."""


def _gpu(name: str, memory_gb: float, bandwidth_tb: float, tflops: float, link_gb: float) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=int(memory_gb * 1e9),
        bandwidth=bandwidth_tb * 1e12,
        flops=tflops * 1e12,
        link_bandwidth=link_gb * 1e9,
    )


# NVIDIA's data sheets of the products. Their tensor core figures with sparsity are halved here.
# PCIe cards have the bandwidth of their PCIe slot: an NVLink bridge joins only two of them.
_ALL = (
    _gpu("H100", 80, 3.35, 989, 900),  # "NVIDIA H100 Tensor Core GPU", column H100 SXM
    _gpu("H100-PCIe", 80, 2.0, 756, 128),  # "NVIDIA H100 PCIe GPU Product Brief", PCIe Gen5
    _gpu("H200", 141, 4.8, 989, 900),  # "NVIDIA H200 Tensor Core GPU", column H200 SXM
    _gpu("A100-80GB", 80, 2.039, 312, 600),  # "NVIDIA A100 Tensor Core GPU", 80GB SXM
    _gpu("A100-40GB", 40, 1.555, 312, 600),  # the same, 40GB SXM
    _gpu("L40S", 48, 0.864, 362, 64),  # "NVIDIA L40S GPU", PCIe Gen4
    _gpu("B200", 180, 8.0, 2250, 1800),  # "NVIDIA DGX B200", an eighth of it
)
GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name.lower(): gpu for gpu in _ALL})
"""By lower-case name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassShape:
    """The rows of a pass."""

    rows: int
    sequences: int
    context_tokens: int
    """Tokens of each sequence whose KV entries are read; rows of a sequence read them once."""
    is_tree: bool = False
    """A step of a draft's tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """The parts of the time of a pass, in seconds."""

    weights: float
    kv: float
    products: float
    all_reduces: float
    kernels: float

    @property
    def seconds(self) -> float:
        """The whole pass. Reading and multiplying overlap."""
        return max(self.weights + self.kv, self.products) + self.all_reduces + self.kernels


def pass_time(
    model: ModelConfig, gpu: Gpu, shape: PassShape, *, num_gpus: int = 1, dtype: str = "bfloat16"
) -> PassTime:
    """Predict the time of a pass.

    Args:
        model: its weights are divided among the GPUs.
        gpu: all GPUs are alike.
        shape: of the pass.
        num_gpus: size of the tensor-parallel group.
        dtype: of weights and KV cache.
    """
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    kv_bytes = shape.sequences * shape.context_tokens * bytes_per_entry(model, dtype)
    flops = 2 * shape.rows * pass_weights(model)
    # Scores and weighted values: two products with each entry of the context.
    flops += (
        4 * shape.rows * shape.context_tokens * model.num_layers * model.num_heads * model.head_size
    )
    kernels = LAYER_KERNELS + HEAD_NORM_KERNELS * has_head_norms(model)
    kernels += TREE_KERNELS * shape.is_tree
    return PassTime(
        weights=pass_weights(model) * DTYPE_BYTES[dtype] / num_gpus / bandwidth,
        kv=kv_bytes / kv_shards(model, num_gpus) / bandwidth,
        products=flops / num_gpus / (gpu.flops * FLOPS_SHARE),
        all_reduces=_all_reduces(model, gpu, shape.rows, num_gpus, dtype),
        kernels=(model.num_layers + 1) * kernels * KERNEL_SECONDS,
    )


def kv_shards(model: ModelConfig, num_gpus: int) -> int:
    """Return the number of parts of the KV cache; ranks beyond the KV heads hold copies."""
    return min(num_gpus, model.num_kv_heads)


def _all_reduces(model: ModelConfig, gpu: Gpu, rows: int, num_gpus: int, dtype: str) -> float:
    """Return the time of two all-reduces of a layer and one of the head."""
    if num_gpus == 1:
        return 0.0
    num_bytes = rows * model.hidden_size * DTYPE_BYTES[dtype]
    # A ring sends every byte twice, less the own part, over one direction of the link.
    sent = 2 * (num_gpus - 1) / num_gpus * num_bytes
    each = ALL_REDUCE_SECONDS + sent / (gpu.link_bandwidth / 2 * LINK_SHARE)
    return (2 * model.num_layers + 1) * each

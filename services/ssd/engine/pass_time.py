"""Predicts the time of a forward pass from the shape of a model; imported without torch.

A pass reads its weights and the KV entries of its context, multiplies, joins the partial sums of
tensor parallelism, and starts kernels. The first two overlap with the third; the others add:

    time = max(bytes / bandwidth, flops / speed) + all-reduces + kernels

On CPUs, they do not overlap: the time of a pass grows evenly with its rows
(``tools/experiments/cpu_draft.py``).

    time = max(bytes / memory bandwidth, bytes / unpacking by the cores) + rows * flops / speed

What is fitted, what is counted and what is assumed:

- ``KERNEL_SECONDS`` and ``ALL_REDUCE_SECONDS`` are fitted: chosen so that plain decoding with the
  kernels of the published engine is near the published speeds on H100s. With them, the other
  predictions are within 15 % (``tests/unit/ssd_cli/test_published_speeds.py``).
- The kernels of ``STATIC`` are counted in the operations that the engine for GPUs records, and a
  test compares them (``tests/unit/ssd/engine/test_kernel_counts.py``). Those of the published
  engine are assumed: its code fuses more.
- The shares of bandwidths and of the peak are assumed, the same for all GPUs.

*Decision*: a kernel of either engine takes the same time. *Because*: there is no measurement of
this engine on a GPU, and the number of its kernels is the known difference. Many of them are small,
so it can be faster than predicted. *Not chosen*: the publication's kernels for this engine, which
has almost twice as many in a layer. *Revisit when* ``make gpu-check`` has run on a GPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ssd.engine.config import DTYPE_BYTES, ModelConfig
from ssd.engine.sizes import bytes_per_entry, has_head_norms, pass_weights

DTYPE = "bfloat16"
"""Data type of weights and KV cache."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Numbers of kernels of an engine."""

    layer: int
    """Kernels of a layer that attends to pages; the kernel of attention is one."""
    head_norms: int
    """Further kernels of a layer with norms of queries and keys."""
    tree: int
    """Further kernels of a layer in a step of a draft's tree: its segments, and their merge."""
    fixed: int
    """Kernels of a pass beside its layers: inputs, embedding, last norm, head."""
    fixed_tree: int
    """Further kernels of a step of a tree beside its layers."""
    adds_parts: bool
    """Ranks gather the parts of a sum and add each of them; else they all-reduce."""

    def of(self, model: ModelConfig, *, is_tree: bool, num_gpus: int = 1) -> int:
        """Return the number of kernels of a pass."""
        layer = self.layer + self.head_norms * has_head_norms(model) + self.tree * is_tree
        if self.adds_parts and num_gpus > 1:
            layer += 2 * num_gpus
        return model.num_layers * layer + self.fixed + self.fixed_tree * is_tree


STATIC = Kernels(layer=18, head_norms=3, tree=15, fixed=20, fixed_tree=11, adds_parts=True)
"""This engine on GPUs, without captured collectives; the numbers of ``test_kernel_counts``."""


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
    """Bandwidth of the link to the other GPUs, bytes a second, both directions together."""


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
"""The GPUs by lower-case name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The CPU cores of a draft."""

    num_cores: int
    """Number of cores, without hardware threads."""
    bandwidth: float
    """Bandwidth of their memory, as a plain read reaches it, bytes a second."""
    has_amx: bool = False
    """Whether they multiply matrices of bfloat16 by AMX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a CPU stores the weights of products and multiplies with them."""

    bytes_per_weight: float
    """Bytes of a weight of a layer, with its scales."""
    bytes_per_head_weight: float
    core_bytes: float
    """Bytes of weights that a core reads and unpacks, a second."""
    core_flops: float
    """Operations of a core a second."""

    def bytes_of_pass(self, model: ModelConfig) -> float:
        """Return the bytes of the weights that a pass reads."""
        head = model.vocab_size * model.hidden_size
        in_layers = pass_weights(model) - head
        return in_layers * self.bytes_per_weight + head * self.bytes_per_head_weight


WEIGHTS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "bfloat16": WeightFormat(
            bytes_per_weight=2, bytes_per_head_weight=2, core_bytes=14e9, core_flops=75e9
        ),
        "int8": WeightFormat(
            bytes_per_weight=1, bytes_per_head_weight=1, core_bytes=9.5e9, core_flops=275e9
        ),
        "int4": WeightFormat(
            # A scale of four bytes for 64 weights.
            bytes_per_weight=0.5625,
            bytes_per_head_weight=1,
            core_bytes=8.7e9,
            core_flops=265e9,
        ),
    }
)
"""Fitted to steps of 6 and 24 branches of OpenVINO, context 512, on two cores of a Xeon with
AVX512-BF16 and VNNI, without AMX (family 6, model 207), in a virtual machine whose plain read
reaches 15 GB/s for each core. Measured ms of 6, 12 and 24 rows:

- Qwen3-0.6B: bfloat16 100, 159, 263; int8 58, 71, 110; int4 51, 66, 104
- Llama-3.2-1B: bfloat16 157, 260, 451; int8 81, 97, 153; int4 63, 82, 135

Int8 of Llama with 6 and 12 rows is the CPU time of a busy machine, divided by two threads. The
constants are between the two models: predictions are up to 20 % too low for Qwen3-0.6B and up to
30 % too high for Llama-3.2-1B. Without AMX, a row in bfloat16 takes three to four times as long as
in int8."""
WEIGHTS_WITH_AMX: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "bfloat16": replace(WEIGHTS["bfloat16"], core_bytes=11e9, core_flops=450e9),
        "int8": replace(WEIGHTS["int8"], core_bytes=7.5e9, core_flops=250e9),
        "int4": replace(WEIGHTS["int4"], core_bytes=6.2e9, core_flops=260e9),
    }
)
"""The same on two cores with AMX (family 6, model 207), whose plain read reaches 17 GB/s each:

- Qwen3-0.6B: bfloat16 81, 89, 110; int8 72, 88, 128; int4 64, 81, 120
- Llama-3.2-1B: bfloat16 113, 114, 148; int8 92, 109, 167; int4 77, 94, 150

Predictions are up to 20 % too low for Qwen3-0.6B, and up to a third too high for Llama-3.2-1B."""


def weight_format(name: str, cpu: Cpu) -> WeightFormat:
    """Return how these cores multiply with weights in a format: bfloat16, int8 or int4."""
    return (WEIGHTS_WITH_AMX if cpu.has_amx else WEIGHTS)[name]


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
    model: ModelConfig,
    gpu: Gpu,
    shape: PassShape,
    *,
    num_gpus: int = 1,
    kernels: Kernels = STATIC,
) -> PassTime:
    """Predict the time of a pass on equal GPUs, among which the weights are divided."""
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE
    kv_bytes = shape.sequences * shape.context_tokens * bytes_per_entry(model, DTYPE)
    num_kernels = kernels.of(model, is_tree=shape.is_tree, num_gpus=num_gpus)
    sent_share = num_gpus - 1 if kernels.adds_parts else 2 * (num_gpus - 1) / num_gpus
    return PassTime(
        weights=pass_weights(model) * DTYPE_BYTES[DTYPE] / num_gpus / bandwidth,
        kv=kv_bytes / kv_shards(model, num_gpus) / bandwidth,
        products=flops_of_pass(model, shape) / num_gpus / (gpu.flops * FLOPS_SHARE),
        all_reduces=_all_reduces(model, gpu, shape.rows, sent_share),
        kernels=num_kernels * KERNEL_SECONDS,
    )


def cpu_pass_time(model: ModelConfig, cpu: Cpu, shape: PassShape, weights: WeightFormat) -> float:
    """Predict the time of a pass on CPU cores, in seconds.

    Without the barriers between its operations, which take longer with more threads.
    """
    num_bytes = weights.bytes_of_pass(model)
    slowest = min(cpu.bandwidth, cpu.num_cores * weights.core_bytes)
    return (
        num_bytes / slowest
        + cpu_kv_bytes(model, shape) / cpu.bandwidth
        + flops_of_pass(model, shape) / (cpu.num_cores * weights.core_flops)
    )


def cpu_kv_bytes(model: ModelConfig, shape: PassShape) -> int:
    """Return the bytes of the KV entries that a pass on CPUs reads; drafts store float32."""
    return shape.sequences * shape.context_tokens * bytes_per_entry(model, "float32")


def flops_of_pass(model: ModelConfig, shape: PassShape) -> int:
    """Return the operations of a pass."""
    # Scores and weighted values: two products with each entry of the context.
    attention = 4 * shape.context_tokens * model.num_layers * model.num_heads * model.head_size
    return shape.rows * (2 * pass_weights(model) + attention)


def kv_shards(model: ModelConfig, num_gpus: int) -> int:
    """Return the number of parts of the KV cache; ranks beyond the KV heads hold copies."""
    return min(num_gpus, model.num_kv_heads)


def _all_reduces(model: ModelConfig, gpu: Gpu, rows: int, sent_share: float) -> float:
    """Return the time of two sums over all ranks of a layer and one of the embedding.

    ``sent_share`` is the bytes that a rank sends over one direction of its link, divided by those
    of the sum: every other rank's copy of a gather, or twice the bytes of a ring less its own.
    """
    if not sent_share:
        return 0.0
    num_bytes = rows * model.hidden_size * DTYPE_BYTES[DTYPE]
    seconds = ALL_REDUCE_SECONDS + sent_share * num_bytes / (gpu.link_bandwidth / 2 * LINK_SHARE)
    return (2 * model.num_layers + 1) * seconds

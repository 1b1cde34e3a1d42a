"""The decoder of Llama and Qwen3 as a graph. Its attention is a parameter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import openvino
import torch
from openvino import Node, opset15
from openvino import Type as ElementType
from torch import Tensor

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models.weights import DecoderWeights, LayerWeights
from ssd.engine.openvino_engine.layers import (
    Rotation,
    ints,
    port,
    reshape,
    rms_norm,
    rows_of,
    swish,
)
from ssd.engine.openvino_engine.matrix import (
    GROUP_OF_INPUTS,
    CopiedMatrix,
    Matrix,
    fits_float16,
    outer,
)
from ssd.engine.precision import SMALL_MODEL, Weights, has_matrices
from ssd.engine.sizes import pass_weights
from ssd.errors import SetupError

PRECISIONS = {"bfloat16": ElementType.bf16, "float32": ElementType.f32}
STEP = 64
"""The sizes of an MLP of one kernel are multiples of it: two threads take 32 inputs each."""
Attend = Callable[[int, Node, Node, Node], Node]
"""(layer, queries [R, H*E], keys [R, G*E], values [R, G*E]) -> [R, H*E]."""


@dataclass(frozen=True, slots=True)
class GraphLayer:
    """The weights of one layer as nodes; see ``LayerWeights``."""

    input_norm_D: Tensor
    rotated: Matrix
    """Queries and keys. Separate products need no split of their result, which copies it."""
    values: Matrix
    query_norm_E: Tensor | None
    key_norm_E: Tensor | None
    output: Matrix
    mlp_norm_D: Tensor
    gate_up: Matrix
    """One product: alone, the gate's would fuse with swish, in kernels that depend on the rows."""
    down: Matrix


@dataclass(frozen=True, slots=True)
class GraphWeights:
    """The weights of a decoder as nodes, for one graph or several passes in one.

    It must live as long as the compiled graphs, which read its memory.
    """

    embedding: Matrix
    layers: Sequence[GraphLayer]
    norm_D: Tensor
    head: Matrix
    free_pages: Callable[[], None]
    """See ``DecoderWeights``. Products read their weights once for each format of a packed copy."""

    @property
    def products(self) -> Sequence[Matrix]:
        """The matrices that rows are multiplied by."""
        layers = [(x.rotated, x.values, x.output, x.gate_up, x.down) for x in self.layers]
        return [self.head, *chain.from_iterable(layers)]

    @property
    def num_bytes(self) -> int:
        """Size of the matrices."""
        return sum(matrix.num_bytes for matrix in {self.embedding, *self.products})

    @property
    def num_unpacked_bytes(self) -> int:
        """Size of the matrices of which products make packed copies in their first pass.

        Only the products of one graph: graphs of fixed shapes copy when they are compiled.
        """
        unpacked = [each for each in self.products if not isinstance(each, CopiedMatrix)]
        return sum(matrix.num_bytes for matrix in unpacked)

    def release(self) -> None:
        """Free the weights of which compiled graphs have copies, after all have been compiled."""
        for matrix in self.products:
            if isinstance(matrix, CopiedMatrix):
                matrix.release()


def multiplies_by_amx(config: ModelConfig, engine: EngineConfig) -> bool:
    """Return whether the products of a large model are of 16-bit matrices on a CPU with AMX."""
    is_16_bit = engine.dtype == "bfloat16" and engine.weights == "same"
    return is_16_bit and pass_weights(config) >= SMALL_MODEL and has_matrices()


def fuses_mlp(config: ModelConfig, engine: EngineConfig) -> bool:
    """Return whether the plugin computes an MLP of this model by a kernel of its own.

    *Decision*: MLPs with 16-bit weights use this kernel on CPUs with AMX, in passes of several
    threads. *Because*: passes of few rows take less time. 3 matrices of 1536 x 4096, two CPUs of a
    Xeon, 1, 16, 32, 64 and 128 rows: 2.2, 2.5, 4.0, 6.8 and 11.5 ms instead of 3.0, 3.3, 4.9, 7.3
    and 11.0. *Not chosen*: models below ``SMALL_MODEL`` weights, which are not faster. A draft has
    many graphs of such a model, each with a copy of the weights. *Revisit when* the kernel runs in
    one thread: OpenVINO 2026.4 divides by half the number of threads.
    """
    sizes = config.hidden_size, config.intermediate_size
    if engine.threads == 1 or any(size % STEP for size in sizes):
        return False
    is_known = multiplies_by_amx(config, engine)
    return is_known and _num_threads(engine) > 1 and _has_kernel(engine)


def _num_threads(engine: EngineConfig) -> int:
    """Return how many threads a graph has: not more than the process has CPUs."""
    row = opset15.parameter([1], ElementType.f32)
    (request,) = compile_graph([opset15.relu(row)], {"row": row}, engine)
    num_threads: int = request.get_compiled_model().get_property("INFERENCE_NUM_THREADS")
    return num_threads


def _has_kernel(engine: EngineConfig) -> bool:
    """Return whether the plugin has the kernel, and computes with its own copy of the weights."""
    gate_up, down = (CopiedMatrix(torch.ones((size, STEP))) for size in (2 * STEP, STEP))
    rows = opset15.parameter([-1, STEP], ElementType.f32)
    (request,) = compile_graph([_mlp(rows, gate_up, down, STEP)], {"rows": rows}, engine)
    graph = request.get_compiled_model().get_runtime_model()
    kinds = {node.get_rt_info()["layerType"].astype(str) for node in graph.get_ops()}
    for matrix in (gate_up, down):
        matrix.release()
    result = request.infer({"rows": np.ones((1, STEP), np.float32)})[0]
    return "LLMMLP" in kinds and bool((result == STEP**3).all())


def graph_weights(
    config: ModelConfig, weights: DecoderWeights, engine: EngineConfig
) -> GraphWeights:
    """Return the weights in the format of the engine."""
    num_rotated = (config.num_heads + config.num_kv_heads) * config.head_size
    stored, is_fused = engine.weights, fuses_mlp(config, engine)
    embedding = Matrix(weights.embedding_VD, outer(stored))
    head = embedding if weights.head_VD is None else Matrix(weights.head_VD, outer(stored))
    layers = [
        _graph_layer(layer, num_rotated, stored, is_fused=is_fused) for layer in weights.layers
    ]
    return GraphWeights(embedding, layers, weights.norm_D, head, weights.free_pages)


def _graph_layer(
    layer: LayerWeights, num_rotated: int, stored: Weights, *, is_fused: bool
) -> GraphLayer:
    """Return the weights of a layer as nodes; ``num_rotated`` is (H + G) * E."""
    rotated_OD, values_OD = layer.qkv_OD.tensor_split([num_rotated])
    is_fused = is_fused and all(map(fits_float16, (layer.gate_up_ID, layer.down_DI)))
    return GraphLayer(
        input_norm_D=layer.input_norm_D,
        rotated=Matrix(rotated_OD, stored),
        values=Matrix(values_OD, stored),
        query_norm_E=layer.query_norm_E,
        key_norm_E=layer.key_norm_E,
        output=Matrix(layer.output_DO, stored),
        mlp_norm_D=layer.mlp_norm_D,
        gate_up=CopiedMatrix(layer.gate_up_ID) if is_fused else Matrix(layer.gate_up_ID, stored),
        down=CopiedMatrix(layer.down_DI) if is_fused else Matrix(layer.down_DI, stored),
    )


def build_decoder(
    config: ModelConfig,
    weights: GraphWeights,
    tokens_R: Node,
    logit_rows: Node,
    rotation: Rotation,
    attend: Attend,
) -> tuple[Node, Node]:
    """Build all layers for rows with these int32 ids.

    Returns:
        Logits of the rows whose int32 numbers are ``logit_rows``, and the sum of each row's hidden
        state, which is finite if the hidden state is.
    """
    hidden = weights.embedding.rows(tokens_R)
    for index, layer in enumerate(weights.layers):
        hidden = _layer(config, layer, hidden, rotation, partial(attend, index))
    total_R = opset15.reduce_sum(hidden, ints(-1))
    normed = rms_norm(rows_of(hidden, logit_rows), weights.norm_D, config.rms_norm_eps)
    return weights.head.times(normed), total_R


def _layer(
    config: ModelConfig,
    layer: GraphLayer,
    hidden: Node,
    rotation: Rotation,
    attend: Callable[[Node, Node, Node], Node],
) -> Node:
    """Return the hidden states [R, D] after a layer, of those before it, [R, D]."""
    epsilon = config.rms_norm_eps
    num_rotated = config.num_heads + config.num_kv_heads
    normed = rms_norm(hidden, layer.input_norm_D, epsilon)
    heads, values = layer.rotated.times(normed), layer.values.times(normed)
    if layer.query_norm_E is not None and layer.key_norm_E is not None:
        queries, keys = _split_heads(config, heads)
        heads = opset15.concat(
            [
                _head_norm(queries, config.num_heads, layer.query_norm_E, epsilon),
                _head_norm(keys, config.num_kv_heads, layer.key_norm_E, epsilon),
            ],
            1,
        )
    queries, keys = _split_heads(config, rotation.rotate(heads, num_rotated))
    attended = attend(queries, keys, values)
    hidden = opset15.add(hidden, layer.output.times(attended))
    normed = rms_norm(hidden, layer.mlp_norm_D, epsilon)
    mlp = _mlp(normed, layer.gate_up, layer.down, config.intermediate_size)
    return opset15.add(hidden, mlp)


def _mlp(rows: Node, gate_up: Matrix, down: Matrix, width: int) -> Node:
    """Return down(swish(gate) * up) of the rows, [R, D], with gate and up of this width."""
    # The plugin's kernel is for three axes.
    is_fused, axis = isinstance(down, CopiedMatrix), ints(0)
    both = gate_up.times(opset15.unsqueeze(rows, axis) if is_fused else rows)
    halves = opset15.variadic_split(both, opset15.constant(-1), ints(width, width))
    output = down.times(opset15.multiply(swish(halves.output(0)), halves.output(1)))
    return opset15.squeeze(output, axis) if is_fused else output


def _split_heads(config: ModelConfig, heads: Node) -> tuple[Node, Node]:
    """Return the queries [R, H*E] and the keys [R, G*E] of both, [R, (H+G)*E]."""
    lengths = ints(config.num_heads * config.head_size, config.num_kv_heads * config.head_size)
    parts = opset15.variadic_split(heads, opset15.constant(1), lengths)
    return parts.output(0), parts.output(1)


def _head_norm(heads: Node, num_heads: int, weight_E: Any, epsilon: float) -> Node:
    """Norm each head of queries [R, H*E] or keys [R, G*E]; the shape stays."""
    size = weight_E.shape[0]
    by_head = reshape(heads, -1, num_heads, size)
    return reshape(rms_norm(by_head, weight_E, epsilon), -1, num_heads * size)


def compile_graph(
    outputs: Sequence[Node],
    inputs: dict[str, Node],
    engine: EngineConfig,
    copies: Sequence[Mapping[str, Sequence[int]]] = (),
) -> list[openvino.InferRequest]:
    """Compile a graph whose inputs have these names, for one caller at a time.

    ``copies`` are the shapes of the inputs of further requests, each with constants of its own.
    Inputs that are missing stay as they are.

    Raises:
        SetupError: OpenVINO cannot compile it on this machine; the message has its reason.
    """
    for name, node in inputs.items():
        node.output(0).get_tensor().set_names({name})
    ports = [port(output) for output in outputs]
    original = openvino.Model(ports, list(inputs.values()), "decoder")
    graphs = [original, *(original.clone() for _ in copies)]
    for graph, shapes in zip(graphs[1:], copies, strict=True):
        graph.reshape(dict(shapes))
    options = {
        "INFERENCE_NUM_THREADS": engine.threads,
        "INFERENCE_PRECISION_HINT": PRECISIONS[engine.dtype],
        "KV_CACHE_PRECISION": PRECISIONS[engine.dtype],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": GROUP_OF_INPUTS,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        # The step thread is pinned by its process; its helpers inherit the CPUs.
        "ENABLE_CPU_PINNING": False,
    }
    try:
        core = openvino.Core()
        compiled = (core.compile_model(graph, "CPU", options) for graph in graphs)
        return [model.create_infer_request() for model in compiled]
    except RuntimeError as error:
        # The first lines are places in the sources of OpenVINO.
        reason = [line for line in str(error).splitlines() if line.strip()][-1]
        raise SetupError(
            f"OpenVINO cannot compile the model: {reason.strip()}; set engine to torch"
        ) from error

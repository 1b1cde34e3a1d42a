"""How the checkpoint of a model becomes a decoder.

Qwen3 has the dense decoder of Llama, with a norm on each head of queries and keys.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from ssd.engine.config import EngineConfig, ModelConfig
from ssd.engine.models import llama
from ssd.engine.models.decoder import Decoder
from ssd.engine.models.headers import check_headers
from ssd.engine.models.weights import Checkpoint, DecoderWeights, TensorReader, read_decoder
from ssd.engine.parallel.group import ALONE, Group
from ssd.engine.parallel.shard import WHOLE, Shard, ids_of, model_of
from ssd.engine.precision import DTYPES


def open_checkpoint(folder: Path, config: ModelConfig, shard: Shard = WHOLE) -> Checkpoint:
    """Check the names and shapes of a folder's tensors, and the head of tied embeddings.

    Args:
        folder: of the checkpoint.
        config: shape of the whole model.
        shard: the rank, whose parts of the tensors are read.

    Raises:
        WeightsError: a missing, surplus, truncated, quantised or misshapen tensor, or a head that
            is not its tied embedding, by name and file.
    """
    checkpoint = Checkpoint(folder, llama.parts(config, shard))
    check_headers(folder, checkpoint.headers, llama.shapes(config), llama.ignored(config))
    if config.tie_word_embeddings:
        checkpoint.check_tied(llama.HEAD, llama.EMBEDDING)
    return checkpoint


def open_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    on_progress: Callable[[float], None],
    shard: Shard = WHOLE,
) -> DecoderWeights:
    """Check a folder's tensors and begin to read them, or a rank's parts of them.

    Args:
        folder: of the checkpoint.
        config: shape of the whole model.
        dtype: of the weights.
        device: of the weights.
        on_progress: called with 0..1.
        shard: the rank.

    Raises:
        WeightsError: as ``open_checkpoint``, or a tensor with NaN or infinity. Iterating over the
            layers raises it too.
    """
    checkpoint = open_checkpoint(folder, config, shard)
    num_tensors = len(llama.shapes(config))
    reader = TensorReader(checkpoint, dtype, device, num_tensors, on_progress)
    return read_decoder(config, reader)


def open_decoder(
    folder: Path,
    config: ModelConfig,
    engine: EngineConfig,
    on_progress: Callable[[float], None],
    group: Group = ALONE,
) -> Decoder:
    """Read a folder as a decoder of torch, or a rank's part of one.

    Raises:
        WeightsError: as ``open_weights``.
    """
    dtype, shard = DTYPES[engine.dtype], group.shard
    weights = open_weights(folder, config, dtype, engine.device, on_progress, shard)
    return Decoder(
        model_of(config, shard),
        weights,
        group,
        ids_of(config, shard).start,
        is_compiled=engine.compile_layers,
    )

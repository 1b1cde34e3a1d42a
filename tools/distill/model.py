"""A small differentiable Llama for training, distilling and measuring the embedded pair.

It has no paging and no batching of unequal lengths, and it is not fast. Parameter names are those
of Hugging Face's ``LlamaForCausalLM``, so its state is a checkpoint.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a Llama."""

    vocab_size: int = 4096
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    mlp_width: int
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def to_config(self) -> dict[str, Any]:
        """Return the ``config.json`` of this shape."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.width,
            "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": END_OF_TEXT_ID,
            "eos_token_id": END_OF_TEXT_ID,
            "torch_dtype": "bfloat16",
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Shape":
        """Read a shape out of a ``config.json`` written by ``to_config``."""
        return cls(
            vocab_size=config["vocab_size"],
            width=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_size=config["head_dim"],
            mlp_width=config["intermediate_size"],
            max_positions=config["max_position_embeddings"],
            rope_theta=config["rope_theta"],
            norm_eps=config["rms_norm_eps"],
        )


TARGET = Shape(width=384, num_layers=8, num_heads=6, num_kv_heads=2, head_size=64, mlp_width=1024)
DRAFT = Shape(width=128, num_layers=2, num_heads=4, num_kv_heads=2, head_size=32, mlp_width=512)

KeyValues = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [B, G, S, E]."""


class Attention(nn.Module):
    """Causal self-attention with grouped key/value heads and rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.num_heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.num_kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.num_kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_size, shape.width, bias=False)

    def forward(
        self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend; returns [B, S, D] and the keys and values so far, [B, G, S, E] each."""
        batch, length, _ = x_BSD.shape
        size = self.shape.head_size
        q_BHSE = self.q_proj(x_BSD).view(batch, length, -1, size).transpose(1, 2)
        k_BGSE = self.k_proj(x_BSD).view(batch, length, -1, size).transpose(1, 2)
        v_BGSE = self.v_proj(x_BSD).view(batch, length, -1, size).transpose(1, 2)
        q_BHSE = rotate(q_BHSE, cos_SE, sin_SE).to(v_BGSE.dtype)
        k_BGSE = rotate(k_BGSE, cos_SE, sin_SE).to(v_BGSE.dtype)
        if past is not None:
            k_BGSE = torch.cat((past[0], k_BGSE), dim=2)
            v_BGSE = torch.cat((past[1], v_BGSE), dim=2)
        y_BHSE = attend(q_BHSE, k_BGSE, v_BGSE)
        y_BSD = y_BHSE.transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(y_BSD), (k_BGSE, v_BGSE)


class Mlp(nn.Module):
    """The gated feed-forward block (SwiGLU)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return the block's addition to the residual stream, [B, S, D]."""
        y_BSD: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))
        return y_BSD


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = Mlp(shape)

    def forward(
        self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the residual stream after this layer, and the keys and values so far."""
        y_BSD, present = self.self_attn(self.input_layernorm(x_BSD), cos_SE, sin_SE, past)
        x_BSD = x_BSD + y_BSD
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD)), present


class Trunk(nn.Module):
    """Everything below the output embedding; its names start with ``model.``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)


class TrainableLlama(nn.Module):
    """A Llama with tied embeddings, in fp32, trained on a CPU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        cos_SE, sin_SE = rotary_tables(shape)
        self.cos_SE: Tensor
        self.sin_SE: Tensor
        self.register_buffer("cos_SE", cos_SE, persistent=False)
        self.register_buffer("sin_SE", sin_SE, persistent=False)

    def initialise(self, generator: torch.Generator) -> None:
        """Draw the weights: normal, 0.02, with the projections into the stream scaled down."""
        scale = (2 * self.shape.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 0.02
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= scale
            with torch.no_grad():
                parameter.normal_(0.0, std, generator=generator)

    def forward(self, token_ids_BS: Tensor) -> Tensor:
        """Return the logits of every position, [B, S, V], in the computing dtype."""
        logits_BSV, _ = self.extend(token_ids_BS, None)
        return logits_BSV

    def extend(self, token_ids_BS: Tensor, past: KeyValues | None) -> tuple[Tensor, KeyValues]:
        """Run tokens that follow ``past``.

        Args:
            token_ids_BS: int64, the new tokens.
            past: Result of the previous call, or None at position 0.

        Returns:
            ``logits_BSV`` of the new positions, and the keys and values up to their end.
        """
        start = 0 if past is None else past[0][0].shape[2]
        stop = start + token_ids_BS.shape[1]
        cos_SE, sin_SE = self.cos_SE[start:stop], self.sin_SE[start:stop]
        x_BSD = self.model.embed_tokens(token_ids_BS)
        present: KeyValues = []
        for index, layer in enumerate(self.model.layers):
            x_BSD, pair = layer(x_BSD, cos_SE, sin_SE, None if past is None else past[index])
            present.append(pair)
        x_BSD = self.model.norm(x_BSD)
        return functional.linear(x_BSD, self.model.embed_tokens.weight), present


def attend(q_BHSE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor) -> Tensor:
    """Return causal attention, [B, H, S, E], of queries that are the last of all positions."""
    num_kv_heads, total = k_BGSE.shape[1:3]
    num_heads, length = q_BHSE.shape[1:3]
    if length == 1:
        # All heads of a group read the same keys, so they can be the rows of one product.
        rows_BGFE = q_BHSE.view(len(q_BHSE), num_kv_heads, -1, q_BHSE.shape[3])
        return functional.scaled_dot_product_attention(rows_BGFE, k_BGSE, v_BGSE).view_as(q_BHSE)
    group = num_heads // num_kv_heads
    keys_BHSE = k_BGSE.repeat_interleave(group, dim=1)
    values_BHSE = v_BGSE.repeat_interleave(group, dim=1)
    if length == total:
        return functional.scaled_dot_product_attention(
            q_BHSE, keys_BHSE, values_BHSE, is_causal=True
        )
    seen_SS = torch.ones(length, total, dtype=torch.bool).tril(total - length)
    return functional.scaled_dot_product_attention(
        q_BHSE, keys_BHSE, values_BHSE, attn_mask=seen_SS
    )


def rotary_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of every position, fp32, [max_positions, E] each."""
    exponent_E = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
    angle_SE = torch.outer(
        torch.arange(shape.max_positions, dtype=torch.float64), shape.rope_theta**-exponent_E
    )
    angle_SE = torch.cat((angle_SE, angle_SE), dim=-1)
    return angle_SE.cos().float(), angle_SE.sin().float()


def rotate(x_BHSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Turn queries or keys to their positions (Hugging Face's half-split layout)."""
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_SE + torch.cat((-second, first), dim=-1) * sin_SE


def save_model(model: TrainableLlama, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        name: value.detach().to(dtype).contiguous() for name, value in model.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.shape.to_config() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID, "do_sample": False},
    )


def load_model(folder: Path) -> TrainableLlama:
    """Load a folder written by ``save_model``, in fp32."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model = TrainableLlama(Shape.from_config(config))
    model.load_state_dict(
        {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    )
    return model


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, indented, ending in a newline."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

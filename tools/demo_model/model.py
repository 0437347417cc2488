"""The demo model's Llama in plain torch, for training, with Hugging Face's tensor names.

RMSNorm, half-rotation RoPE, grouped-query attention, SwiGLU, and tied embeddings. Handles token ids
only, no text.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model's shape, with the field names of a Hugging Face Llama config."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 1024


class Cache:
    """KV cache of all layers, for generation."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [B, H, T, D] of a layer and return all keys and values of it."""
        if layer in self.layers:
            old_k, old_v = self.layers[layer]
            k, v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
        self.layers[layer] = (k, v)
        return k, v


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [max_position, head_dim], with equal halves."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = torch.outer(
        torch.arange(config.max_position_embeddings, dtype=torch.float32),
        1.0 / config.rope_theta**half,
    )
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys [B, H, T, D] by their positions' angles, [T, D] or [B, 1, T, D]."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        width, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(width, config.num_attention_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * dim, width, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Attend from [B, T, C] to itself and the cache; causally without a mask."""
        batch, length, _ = x.shape
        heads = self.config.num_attention_heads, self.config.num_key_value_heads
        dim = self.config.head_dim
        q = self.q_proj(x).view(batch, length, heads[0], dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, heads[1], dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, heads[1], dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        groups = heads[0] // heads[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result


class FeedForward(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, C] to [B, T, C]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward with pre-norm and residual connections."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """Map [B, T, C] to [B, T, C]."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Trunk(nn.Module):
    """Embeddings, layers and the final norm, named `model` in Hugging Face checkpoints."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """The language model. Its output layer shares the weights of the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        cos, sin = rope_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        deep = (2 * config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(
                    weight,
                    std=0.02
                    if "embed" in name
                    else weight.shape[1] ** -0.5 * (deep if last else 1.0),
                )

    def hidden(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Return the last hidden states [B, T, C] of ids [B, T].

        Args:
          ids: token ids.
          mask: positions that may be attended to, [B, 1, T, all]; causal if None.
          positions: positions [B, T]; from 0 if None.
          cache: KV cache, extended in place, for generation.
        """
        if positions is None:
            cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        else:
            cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask, cache)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states [..., C] to logits [..., V]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters; tied ones count once."""
        return sum(weight.numel() for weight in self.parameters())

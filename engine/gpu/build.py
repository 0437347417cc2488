"""Build the GPU model and decoder for `--backend flash` and `--backend triton`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from triolet.errors import ConfigError

from ..attention.interface import PagedAttention
from ..attention.registry import backend_traits, create_attention
from .buckets import bucket_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.config import EngineConfig

    from ..kv_pool import KVPool
    from ..layers import Weights
    from ..model_config import ModelConfig
    from .decoder import Decoder
    from .model import FusedModel


class GpuParts(NamedTuple):
    """The computing parts on a GPU.

    Attributes:
      model: computes steps of any kind.
      decoder: computes steps of decode rows only.
    """

    model: FusedModel
    decoder: Decoder


def build_parts(
    backend: str,
    model_config: ModelConfig,
    weights: Weights,
    pool: KVPool,
    config: EngineConfig,
    max_model_len: int,
) -> GpuParts:
    """Build the fused forward pass.

    Raises:
      ConfigError: Triton or the backend's package is not installed.
    """
    try:
        from .decoder import Decoder
        from .model import FusedModel
        from .transformer import FusedTransformer
    except ImportError as error:
        raise ConfigError(
            f"backend is {backend!r}, but Triton cannot be imported ({error}); install a CUDA "
            "build of torch, which brings it, or use backend 'sdpa'"
        ) from error
    attention = create_attention(backend, pool, model_config.num_heads, max_model_len)
    assert isinstance(attention, PagedAttention), "the backend is not paged"
    transformer = FusedTransformer(model_config, weights, pool, attention, max_model_len)
    model = FusedModel(transformer, pool.layout.block_size, pool.blocks.device)
    sizes = bucket_sizes(config.max_num_seqs, fixed=config.gpu.fixed_batch)
    decoder = Decoder(transformer, pool, sizes, max_model_len, config.masks.launched_wait_s)
    return GpuParts(model, decoder)


def capture(backend: str, decoder: Decoder, on_progress: Callable[[float], None]) -> None:
    """Capture decode steps as CUDA graphs and replay those from now on, if the backend allows
    it."""
    if backend_traits(backend).is_capturable:
        from .graphs import StepGraphs

        decoder.replay_with(StepGraphs(decoder.compute, decoder.sizes, on_progress).replay)

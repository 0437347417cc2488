"""What every attention backend offers, and what it can be used with.

Knows no kernel. A backend is asked to `plan` once per step and to `attend` once per layer; it
stores the step's keys and values itself, so that a backend may fuse the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triolet.config import Dtype, require

if TYPE_CHECKING:
    from torch import Tensor

    from ..batch import FlatStep


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """What a backend can do; checked against the config once, at start.

    Attributes:
      name: as in `EngineConfig.backend`.
      device_types: torch device types.
      dtypes: cache dtypes.
      block_size_multiple: block sizes must be multiples of this.
      head_dim_multiple: head dimensions must be multiples of this,
      max_head_dim: and at most this.
      is_path_invariant: KV of a token has the same bits whether it was computed as a part of a
        prompt or of a completion.
    """

    name: str
    device_types: frozenset[str]
    dtypes: frozenset[Dtype]
    block_size_multiple: int
    head_dim_multiple: int
    max_head_dim: int
    is_path_invariant: bool = False

    def check(self, device_type: str, dtype: Dtype, block_size: int, head_dim: int) -> None:
        """Refuse a configuration that this backend cannot serve.

        Raises:
          ConfigError: names the field, its value and what is allowed.
        """
        of_backend = f"with backend {self.name!r}"
        require(
            device_type in self.device_types,
            "device",
            device_type,
            f"{', '.join(sorted(self.device_types))} {of_backend}",
        )
        require(
            dtype in self.dtypes,
            "dtype",
            dtype.value,
            f"{', '.join(sorted(self.dtypes))} {of_backend}",
        )
        require(
            block_size % self.block_size_multiple == 0,
            "block_size",
            block_size,
            f"multiples of {self.block_size_multiple} {of_backend}",
        )
        require(
            head_dim <= self.max_head_dim and head_dim % self.head_dim_multiple == 0,
            "head_dim of the model",
            head_dim,
            f"multiples of {self.head_dim_multiple} up to {self.max_head_dim} {of_backend}",
        )


class AttentionBackend(Protocol):
    """Attention for one worker's pool. Used by the device thread only."""

    def plan(self, step: FlatStep) -> None:
        """Prepare what all layers of a step share. Called once, before the first `attend`."""
        ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store a layer's keys and values, then attend, causally, to each row's whole sequence.

        Args:
          layer: index of the layer.
          query: [T, num_heads, head_dim], rotated; T counts padding.
          key: [T, num_kv_heads, head_dim], rotated.
          value: [T, num_kv_heads, head_dim].

        Returns:
          [T, num_heads, head_dim]; what stands at padding is finite and means nothing.
        """
        ...

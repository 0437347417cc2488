"""What each backend supports: devices, dtypes, sizes. Checked before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from triolet.config import AUTO_BACKEND, Dtype, require
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from triolet.config import EngineConfig


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """What a backend supports; checked against the config at start.

    Attributes:
      name: name in `EngineConfig.backend`.
      device_types: torch device types.
      dtypes: cache dtypes.
      block_size_multiple: block sizes must be multiples of this.
      head_dim_multiple: head dimensions must be multiples of this.
      max_head_dim: largest head dimension.
      is_capturable: whether decode steps read everything that changes from tensors, so that a CUDA
        graph of one step computes every step with the same number of rows.
      is_path_invariant: whether a token's KV has the same bits when computed as part of a prompt
        and as part of a completion.
    """

    name: str
    device_types: frozenset[str]
    dtypes: frozenset[Dtype]
    block_size_multiple: int
    head_dim_multiple: int
    max_head_dim: int
    is_capturable: bool = False
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


NATIVE: Final = BackendTraits(
    name="native",
    device_types=frozenset({"cpu"}),
    dtypes=frozenset({Dtype.FLOAT32, Dtype.BFLOAT16}),
    block_size_multiple=1,
    head_dim_multiple=16,  # a vector of the widest build
    max_head_dim=256,  # rows on the kernels' stack
    is_path_invariant=True,
)
SDPA: Final = BackendTraits(
    name="sdpa",
    device_types=frozenset({"cpu", "cuda"}),
    dtypes=frozenset({Dtype.FLOAT32, Dtype.BFLOAT16}),
    block_size_multiple=1,
    head_dim_multiple=2,  # rotation pairs the dimensions
    max_head_dim=1024,
)
FLASH: Final = BackendTraits(
    name="flash",
    device_types=frozenset({"cuda"}),
    dtypes=frozenset({Dtype.BFLOAT16}),
    block_size_multiple=256,
    head_dim_multiple=8,
    max_head_dim=256,
    is_capturable=True,
)
TRITON: Final = BackendTraits(
    name="triton",
    device_types=frozenset({"cuda"}),
    dtypes=frozenset({Dtype.FLOAT32, Dtype.BFLOAT16}),
    block_size_multiple=1,
    head_dim_multiple=2,  # rotation pairs the dimensions
    max_head_dim=256,  # a tile of keys and one of values in shared memory
    is_capturable=True,
)
ALL_TRAITS: Final = {traits.name: traits for traits in (NATIVE, SDPA, FLASH, TRITON)}
FUSED: Final = frozenset({FLASH.name, TRITON.name})
"""Backends with fused kernels. Their decode steps do not wait for the host."""


def check_backend(config: EngineConfig, dtype: Dtype, head_dim: int, device_type: str) -> None:
    """Check that the configured backend can serve a model with these settings and adapters.

    Args:
      config: settings of the engine; the backend is not `auto`.
      dtype: dtype of the computation.
      head_dim: the model's head dimension.
      device_type: cpu or cuda.

    Raises:
      ConfigError: names the field, its value and what is allowed.
    """
    if config.adapters and config.backend in FUSED:
        names = ", ".join(one.name for one in config.adapters)
        raise ConfigError(
            f"backend is {config.backend!r}, which does not support adapters, and the model has "
            f"some ({names}); use backend 'sdpa', or 'native' on a CPU, or remove the adapters"
        )
    allowed = ", ".join(sorted((AUTO_BACKEND, *ALL_TRAITS)))
    require(config.backend in ALL_TRAITS, "backend", config.backend, allowed)
    ALL_TRAITS[config.backend].check(device_type, dtype, config.block_size, head_dim)

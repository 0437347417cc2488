"""What only matters on an NVIDIA GPU, each beside its reason. Knows numbers."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ConfigError
from .units import MIB


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """How a worker uses its GPU."""

    cuda_graphs: bool = True
    """Capture decode steps once for each size of batch and replay them; `triton` and `flash` only.
    Off, every kernel is launched by itself: slower, and easier to look into."""
    fixed_batch: bool = False
    """Pad every decode step to `max_num_seqs` rows. Matrix products choose their kernel by the
    number of rows, so that a token's last bits may depend on how many others are in the step; with
    one number they cannot. Costs what the padding costs."""
    pinned_bytes: int = 32 * MIB
    """Host memory through which KV enters the pool: two windows (`kv_window_bytes`) of chunks whose
    copies may be under way. What leaves goes straight into a prefill worker's ring."""

    def __post_init__(self) -> None:
        if self.pinned_bytes < 1:
            raise ConfigError(f"pinned_bytes is {self.pinned_bytes!r}; allowed: >= 1")

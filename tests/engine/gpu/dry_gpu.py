"""A GPU that computes nothing: it takes down every kernel that the engine launches.

The launches are the engine's own, on tensors in host memory; Triton sees an H100 and specialises
the arguments as it would there. For processes in which nothing is interpreted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

HOPPER: Final = GPUTarget("cuda", 90, 32)


class DryDriver:
    """What Triton asks of a driver before it launches a kernel."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel as it was launched: what Triton would compile.

    Attributes:
      kernel: the JITFunction.
      details: Triton's own description.
    """

    kernel: Any
    details: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.fn.__name__)

    def compiled(self) -> Any:  # noqa: ANN401 - triton.compiler.CompiledKernel
        """Compile it for an H100, with the attributes of the launch."""
        [attributes] = self.details["configs"]
        source = ASTSource(
            self.kernel, self.details["signature"], self.details["constants"], attributes
        )
        options = {name: self.details[name] for name in ("num_warps", "num_stages", "num_ctas")}
        return triton.compile(source, target=HOPPER, options=options)


class NoKernel:
    """What Triton finds in its cache when a kernel is launched again: it computes nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """Describe nothing."""

    def run(self, *_: object) -> None:
        """Launch nothing."""


class DryGpu:
    """Takes down what Triton would compile while its context is open. The driver stays: no machine
    without a GPU has another one.

    Attributes:
      launches: the first of each kernel and key in this process.
    """

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def __enter__(self) -> Self:
        driver.set_active(DryDriver())
        knobs.runtime.jit_cache_hook = self._take_down
        return self

    def __exit__(self, *_: object) -> None:
        knobs.runtime.jit_cache_hook = None

    def _take_down(self, **told: Any) -> bool:  # noqa: ANN401 - whatever Triton tells its hooks
        launch = Launch(told["fn"].jit_function, told["compile"])
        self.launches.append(launch)
        cache = launch.kernel.device_caches[told["compile"]["device"]][0]
        cache[told["key"]] = NoKernel()
        return True  # neither compile nor launch

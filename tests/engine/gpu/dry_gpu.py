"""A fake H100 for tests of Triton kernels: it records every kernel that the engine launches and
computes nothing.

Tensors are in host memory, and Triton specialises arguments as on an H100. For processes that do
not use Triton's interpreter.
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
    """The driver calls that Triton makes before it launches a kernel."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return HOPPER


@dataclass(frozen=True, eq=False)
class Launch:
    """One recorded launch: what Triton would compile.

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
    """The cached kernel that Triton finds on later launches; does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        """Describe nothing."""

    def run(self, *_: object) -> None:
        """Launch nothing."""


class DryGpu:
    """Context manager that records what Triton would compile. The fake driver stays installed after
    it, because a machine without a GPU has no other.

    Attributes:
      launches: the first launch of each kernel and key in this process.
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

"""Find the compiled C kernels, load the best build for this machine, and declare their functions.

The kernels are optional: if they were not compiled, or the machine supports none of the instruction
sets, `load_library` returns None and the engine computes with torch.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

import xxhash

from .builds import BUILDS
from .structs import GroupPackingFields, LinearFields, ModelFields, PackingFields, StepFields

_FOLDER: Final = Path(__file__).parent
_MAPS: Final = Path("/proc/self/maps")
_RUNTIMES: Final = ("libgomp", "libiomp5", "libomp")


class Library:
    """One build of the kernels.

    Args:
      build: one of BUILDS.
      path: the shared library.

    Attributes:
      digest: digest of the file; libraries of one build may lay out panels differently.
      arithmetic: version of the arithmetic; builds with equal numbers compute the same bits.
      panel: outputs per panel of a weight.
      rows_per_task: query rows that attention computes together.
    """

    def __init__(self, build: str, path: Path) -> None:
        self.build = build
        self.digest = xxhash.xxh3_128(path.read_bytes()).hexdigest()
        loaded = ctypes.CDLL(str(path))
        for function in (
            *("panel", "runs_here", "rows_per_task", "workspace_bytes", "arithmetic"),
        ):
            getattr(loaded, f"triolet_{function}").restype = c_int64
        self._workspace_bytes = loaded.triolet_workspace_bytes
        self._workspace_bytes.argtypes = (POINTER(ModelFields), c_int64, c_int64, c_int64)
        self._compute = loaded.triolet_compute
        self._compute.argtypes = (POINTER(ModelFields), POINTER(StepFields), c_int64)
        self._compute.restype = None
        self._attend = loaded.triolet_attend
        self._attend.argtypes = (
            POINTER(ModelFields),
            POINTER(StepFields),
            c_int64,
            c_void_p,
            c_void_p,
        )
        self._attend.restype = None
        self._pack = loaded.triolet_pack
        self._pack.argtypes = (POINTER(PackingFields), c_int64)
        self._pack.restype = None
        self._pack_groups = loaded.triolet_pack_groups
        self._pack_groups.argtypes = (POINTER(GroupPackingFields), c_int64)
        self._strip_bytes = loaded.triolet_strip_bytes
        self._strip_bytes.argtypes = (c_int64, c_int64)
        self._pack_groups.restype = self._strip_bytes.restype = c_int64
        self._product = loaded.triolet_product
        self._product.argtypes = (
            *(c_int64, POINTER(LinearFields), c_void_p, c_int64, c_void_p, c_void_p, c_int64),
        )
        self._weights = loaded.triolet_weights
        self._weights.argtypes = (POINTER(LinearFields), c_int64, c_int64, c_void_p)
        self._product.restype = self._weights.restype = None
        self._time_reading = loaded.triolet_time_reading
        self._time_reading.argtypes = (c_void_p, c_int64, c_int64)
        self._time_products = loaded.triolet_time_products
        self._time_products.argtypes = (c_int64, c_int64, c_int64)
        self._time_reading.restype = self._time_products.restype = c_double
        self._product_operations = loaded.triolet_product_operations
        self._product_operations.argtypes = (c_int64,)
        self._product_operations.restype = c_int64
        self.runs_here = bool(loaded.triolet_runs_here())
        self.arithmetic = int(loaded.triolet_arithmetic())
        self.panel = int(loaded.triolet_panel())
        self.rows_per_task = int(loaded.triolet_rows_per_task())

    def workspace_bytes(
        self, model: ModelFields, num_tokens: int, num_threads: int, num_adapted: int = 0
    ) -> int:
        """Return the workspace size of a step with `num_adapted` tokens that use an adapter."""
        return int(self._workspace_bytes(model, num_tokens, num_adapted, num_threads))

    def compute(self, model: ModelFields, step: StepFields, num_threads: int) -> None:
        """Compute a step, with the interpreter's lock released."""
        self._compute(model, step, num_threads)

    def pack(self, packing: PackingFields, num_threads: int) -> None:
        """Pack a weight into panels, with the interpreter's lock released."""
        self._pack(packing, num_threads)

    def strip_bytes(self, form: int, inputs: int) -> int:
        """Return the size of half a panel of quantised weights."""
        return int(self._strip_bytes(form, inputs))

    def pack_groups(self, packing: GroupPackingFields, num_threads: int) -> int:
        """Pack quantised weights into strips. Return how many scales are not finite."""
        return int(self._pack_groups(packing, num_threads))

    def weights(self, layer: LinearFields, inputs: int, output: int, to: int) -> None:
        """Write the weights of one quantised output to an address. For tests."""
        self._weights(layer, inputs, output, to)

    def product(
        self,
        is_bf16: bool,
        layer: LinearFields,
        rows: int,
        addresses: tuple[int, int, int],
        num_threads: int,
    ) -> None:
        """Compute a single product. For tests and benchmarks.

        Args:
          is_bf16: whether the model is bf16; else fp32. A quantised layer's input is always fp32.
          layer: the linear layer.
          rows: rows of the input.
          addresses: addresses of the input, of a workspace of 8 bytes per input word, and of the
            output.
          num_threads: number of threads.
        """
        given, room, output = addresses
        self._product(is_bf16, layer, given, rows, room, output, num_threads)

    def read_speed(self, address: int, num_bytes: int, num_threads: int) -> float:
        """Measure the memory read speed in bytes per second. For benchmarks."""
        return num_bytes / float(self._time_reading(address, num_bytes, num_threads))

    def product_speed(self, is_bf16: bool, rounds: int, num_threads: int) -> float:
        """Measure products of cached data in operations per second. For benchmarks."""
        seconds = float(self._time_products(is_bf16, rounds, num_threads))
        return rounds * num_threads * int(self._product_operations(is_bf16)) / seconds

    def attend(
        self, model: ModelFields, step: StepFields, layer: int, queries: int, output: int
    ) -> None:
        """Compute attention alone. For tests. The last two arguments are addresses."""
        self._attend(model, step, layer, queries, output)


def library_path(build: str) -> Path | None:
    """Return the path of a build, or None if it is not installed."""
    for suffix in EXTENSION_SUFFIXES:
        path = _FOLDER / f"_{build}{suffix}"
        if path.exists():
            return path
    return None


@cache
def load_library() -> Library | None:
    """Load the best build that this machine can run; None if there is none."""
    for build in BUILDS:
        library = load_build(build)
        if library is not None:
            return library
    return None


def load_build(build: str) -> Library | None:
    """Load one build; None if it is not installed or this machine cannot run it."""
    path = library_path(build)
    if path is None:
        return None
    _offer_openmp()
    try:
        library = Library(build, path)
    except OSError:  # no OpenMP runtime, or a file for another platform
        return None
    return library if library.runs_here else None


@cache
def _offer_openmp() -> None:
    """Make torch's OpenMP runtime visible to the kernels.

    The kernels are not linked to a runtime, so that they share torch's threads: the idle threads of
    two pools would spin against each other. torch usually exports its runtime already.
    """
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    names = [*_loaded_runtimes(), "libgomp.so.1"]
    for name in names:
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return


def _loaded_runtimes() -> list[str]:
    if not _MAPS.exists():
        return []
    mapped = {line.split()[-1] for line in _MAPS.read_text().splitlines() if "/" in line}
    return sorted(path for path in mapped if Path(path).name.startswith(_RUNTIMES))

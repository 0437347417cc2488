"""The builds of the C kernels (one per instruction set) and their compiler flags.

setup.py reads this file before anything is installed, so it imports nothing from the package.
"""

from __future__ import annotations

from typing import Final

COMMON: Final = (
    "-O3",
    "-std=c11",
    # No implicit fused multiply-add, so that every compiler and build gives the same bits.
    "-ffp-contract=off",
    # OpenMP pragmas without linking a runtime: see library.py.
    "-fopenmp",
    "-fvisibility=hidden",
)
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c")
BUILDS: Final[dict[str, tuple[str, ...]]] = {
    "avx512bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx2": _AVX2,
}
"""Builds of the same source, best first."""

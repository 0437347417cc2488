"""The builds of the kernels, and what each is compiled with.

Read by setup.py before anything is installed, so it imports nothing of the package.
"""

from __future__ import annotations

from typing import Final

COMMON: Final = (
    "-O3",
    "-std=c11",
    # No sum is fused that the source does not fuse: every compiler and build give the same bits.
    "-ffp-contract=off",
    # OpenMP's calls, but no runtime: see library.py.
    "-fopenmp",
    "-fvisibility=hidden",
)
_AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma")
BUILDS: Final[dict[str, tuple[str, ...]]] = {
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": ("-mavx2", "-mfma"),
}
"""Best first; each is the same source for other instructions."""

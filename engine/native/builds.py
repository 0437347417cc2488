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
_AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
_AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma", "-mf16c")
BUILDS: Final[dict[str, tuple[str, ...]]] = {
    "avx512bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "avx512vnni": (*_AVX512, "-mavx512vnni"),
    "avx512": _AVX512,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx2": _AVX2,
}
"""Best first; each is the same source for other instructions."""

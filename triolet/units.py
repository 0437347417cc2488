"""Units, so that a bound reads as what it is: `10 * SECONDS`, `2 * MIB`."""

from typing import Final

SECONDS: Final = 1.0
MILLISECONDS: Final = 0.001
KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

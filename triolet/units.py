"""Units for readable bounds, such as `10 * SECONDS`, and parsing and printing of sizes, such as
`512MiB` for 536870912 bytes.
"""

from __future__ import annotations

import re
from typing import Final

from .errors import ConfigError

SECONDS: Final = 1.0
MILLISECONDS: Final = 0.001
KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
NANOS: Final = 1_000_000_000
"""Per unit of the operator's currency: money is counted in whole numbers, so that sums are
exact."""
_UNITS: Final = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": 1024 * GIB}
_SPAN: Final = re.compile(r"([0-9]{1,6})([smhd])")
_UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def parse_size(text: str) -> int:
    """Parse a size in bytes, such as `512MiB`, `1.5GiB` or `1048576`.

    Raises:
      ConfigError: it is not a size.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ConfigError(
            f"size {text!r} is invalid; allowed: bytes, or a number with KiB, MiB, GiB or "
            "TiB, such as 512MiB"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def parse_span(text: str) -> int | None:
    """Parse a duration such as `30m`, `24h` or `7d` to seconds; None if it is not one."""
    match = _SPAN.fullmatch(text)
    return int(match[1]) * _UNIT_S[match[2]] if match else None


def show_size(size_bytes: int) -> str:
    """Format bytes in the largest unit that gives at least 1, such as `1.5 GiB`."""
    for unit, factor in (("TiB", 1024 * GIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size_bytes} B"


def show_count(count: int) -> str:
    """Format a large count as people say it, such as `3.2M` parameters."""
    for unit, factor in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f}{unit}"
    return str(count)

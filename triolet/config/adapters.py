"""Settings of LoRA adapters for workers and servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Iterable

SEPARATOR: Final = ":"
"""Separates the names of model and adapter in requests."""
_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")

_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """One LoRA adapter of a model. `triolet serve` fills it in."""

    name: str
    """The part after the model's name and a colon in requests."""
    path: str
    """Absolute path of its directory."""
    base: str
    """Compute digest of the model version that the adapter was made for; empty for a model outside
    the store."""
    digest: str
    """sha256:… of its numbers and of `base`, checked when the adapter is read."""

    def __post_init__(self) -> None:
        require_adapter_names((self.name,))
        if not _DIGEST.fullmatch(self.digest):
            raise SettingError(
                f"adapters has {self.name} with the digest {self.digest[:80]!r}; allowed: sha256: "
                "and 64 hexadecimal digits; set fleet.adapters, which computes it"
            )


def require_adapter_names(names: Iterable[str]) -> None:
    """Check the names of adapters.

    Raises:
      SettingError: a name is not allowed.
    """
    for name in names:
        if not _NAME.fullmatch(name):
            raise SettingError(
                f"adapters has {name[:80]!r}, which is not an adapter name; allowed: 1 to 63 of "
                "the characters a-z, A-Z, 0-9, '.', '_' and '-', a letter or digit first and last"
            )

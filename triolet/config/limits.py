"""Bounded field types, which `msgspec.convert` checks when settings are read, and `require` for
bounds that depend on other fields.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

from msgspec import Meta

from ..errors import SettingError

Count: TypeAlias = Annotated[int, Meta(ge=1)]
CountOrZero: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[float, Meta(gt=0)]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(gt=0, le=1)]
ShareOrZero: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
LabelText: TypeAlias = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._-]{0,63}\Z")]
"""A label value as in Kubernetes; may be empty."""

LABEL: Final = re.compile(r"[A-Za-z0-9._-]{1,63}")
"""A label value as in Kubernetes."""


def require(is_allowed: bool, name: str, value: object, allowed: str) -> None:
    """Raise a SettingError that names field, value and remedy unless `is_allowed`."""
    if not is_allowed:
        raise SettingError(f"{name} is {value!r}; allowed: {allowed}")

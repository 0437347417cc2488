"""What the fields of frames may hold: bounds of counts, texts, durations, packed ids.

Knows types and limits; knows no frame.
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from triolet.config import MAX_NUM_SEQS

MAX_ROWS: Final = 65_536
MAX_TOKEN_ROWS: Final = MAX_NUM_SEQS
"""Rows of one step; with 20 alternatives each they take 8 MiB in memory."""
MAX_TEXT: Final = 4096
MAX_SECONDS: Final = 1e9
"""Thirty years: keeps infinity out."""
MAX_TOKENS_ON_WIRE: Final = 4 * 1024 * 1024
"""Token ids per frame; ids travel packed, 4 bytes each."""

RequestIdField: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
Rate: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
PackedTokens: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKENS_ON_WIRE)]
Salt: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=16)]
"""Whose prefix cache: KV is found again under the same salt only. Empty for everybody's."""
Tenant: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=8)]
"""For whom KV is kept: a digest of the tenant's name. Empty where there are no tenants."""
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
"""Of some room; no keeper's is nothing."""
Weight: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
"""Of one tenant beside others."""
Vector: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=4 * 65_536)]
"""Numbers as little-endian fp32; far more than any model's hidden states have."""
KvKey: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=32)]
"""With which an attempt's chunks are authenticated. Empty from a server that knows of none."""
Mac: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=16)]
"""Of a frame and its payload, by the attempt's `KvKey`. Empty where the link has keys itself."""
Digest: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A group of fields inside frames; an array on the wire."""

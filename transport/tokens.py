"""Pack and unpack token ids: four little-endian bytes each, on every machine.

A list of small msgpack integers would cost one object per token on both sides; this way a prompt of
100k tokens is one copy.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING

from triolet.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

_TYPECODE = "I"
_ITEM_BYTES = 4


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Return ids as packed bytes.

    Raises:
      LocalProtocolError: an id is negative or does not fit into 32 bits.
    """
    try:
        packed = array(_TYPECODE, token_ids)
    except (OverflowError, TypeError) as error:
        raise LocalProtocolError(f"token ids must be 32-bit and not negative: {error}") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Return the ids that `pack_tokens` packed.

    Raises:
      RemoteProtocolError: the length is not a multiple of four.
    """
    if len(data) % _ITEM_BYTES:
        raise RemoteProtocolError(f"packed token ids of {len(data)} bytes: not a multiple of 4")
    packed = array(_TYPECODE)
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return tuple(packed)

"""Encode frames as msgpack and decode them against their schema.

A frame is a msgpack array `[tag, field, ...]` in one message part; KV bytes travel in a second part
beside it. The parser follows the schema and stops at the first byte that does not fit, before it
builds anything, so no frame costs more memory than it has bytes. (Parsing first and checking
afterwards turned 16 MiB of nested empty arrays into 1.1 GiB.) Invalid input raises
RemoteProtocolError. Class names and pickles never travel.

msgpack writes and msgspec reads: two implementations that must agree keep the format honest, and a
peer in another language needs only msgpack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgpack
import msgspec

from triolet.errors import LocalProtocolError, RemoteProtocolError

from .frames import AnyFrame, Embed, KvChunk, KvManifest, Prefill, Reserve, Welcome, frame_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NUM_OPTIONAL: Final[Mapping[type[AnyFrame], int]] = {
    Welcome: 1,
    Reserve: 2,
    Prefill: 2,
    KvChunk: 1,
    KvManifest: 1,
    Embed: 1,
}
"""Frames whose trailing fields are left out when empty, as they are on most links. Peers of a
release without these fields still understand the frame."""
_DECODER: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


def encode(frame: AnyFrame) -> bytes:
    """Return the wire form of a frame.

    Raises:
      LocalProtocolError: a field does not fit into msgpack, which is a bug on our side.
    """
    try:
        fields = msgspec.to_builtins(frame, builtin_types=(bytes,))
        for _ in range(_NUM_OPTIONAL.get(type(frame), 0)):
            if fields[-1]:
                break
            fields.pop()
        packed: bytes = msgpack.packb(fields)
    except (ValueError, OverflowError, TypeError) as error:
        raise LocalProtocolError(f"cannot encode {frame_name(frame)}: {error}") from error
    return packed


def decode(data: bytes | memoryview, max_bytes: int) -> AnyFrame:
    """Return the frame that `data` holds.

    Args:
      data: one message part.
      max_bytes: largest frame allowed on this socket.

    Raises:
      RemoteProtocolError: too long, not msgpack, an unknown tag, a wrong or missing field.
    """
    if len(data) > max_bytes:
        raise RemoteProtocolError(f"frame of {len(data)} bytes; allowed: at most {max_bytes}")
    try:
        return _DECODER.decode(data)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RemoteProtocolError(f"not a frame: {str(error)[:200]}") from error


def encode_message(frame: AnyFrame, payload: bytes | memoryview | None) -> list[bytes | memoryview]:
    """Return the message parts of a frame and its KV bytes.

    Raises:
      LocalProtocolError: the payload is missing, or the frame takes none.
    """
    if (payload is not None) != _has_payload(frame):
        raise LocalProtocolError(f"{frame_name(frame)}: only a KV_CHUNK has a payload")
    return [encode(frame)] if payload is None else [encode(frame), payload]


def decode_message(
    parts: Sequence[bytes | memoryview], max_bytes: int
) -> tuple[AnyFrame, memoryview | None]:
    """Return the frame and payload of received message parts.

    Raises:
      RemoteProtocolError: the parts are not one frame with its payload.
    """
    if not 1 <= len(parts) <= 2:
        raise RemoteProtocolError(f"a message has one or two parts, not {len(parts)}")
    frame = decode(parts[0], max_bytes)
    payload = memoryview(parts[1]) if len(parts) == 2 else None
    if (payload is not None) != _has_payload(frame):
        raise RemoteProtocolError(f"{frame_name(frame)}: only a KV_CHUNK has a payload")
    if payload is not None and payload.nbytes > max_bytes:
        raise RemoteProtocolError(f"payload of {payload.nbytes} bytes; at most {max_bytes}")
    return frame, payload


def _has_payload(frame: AnyFrame) -> bool:
    return isinstance(frame, KvChunk) and frame.shared is None

"""Frames to bytes and back.

A frame is a msgpack array `[tag, field, ...]` in one message part; KV bytes ride in a second part
beside it, never inside. Parsing is bounded first (lengths, depth), then checked against the schema;
anything else is a RemoteProtocolError. No class name and no pickle ever travels.
"""

from __future__ import annotations

import msgpack
import msgspec

from triolet.errors import LocalProtocolError, RemoteProtocolError

from .frames import MAX_ROWS, MAX_TEXT, AnyFrame


def encode(frame: AnyFrame) -> bytes:
    """Return the wire form of a frame.

    Raises:
      LocalProtocolError: a field is outside its bounds: a bug of ours.
    """
    try:
        packed: bytes = msgpack.packb(msgspec.to_builtins(frame, builtin_types=(bytes,)))
    except (ValueError, OverflowError, TypeError) as error:
        raise LocalProtocolError(f"cannot encode {type(frame).__name__}: {error}") from error
    return packed


def decode(data: bytes | memoryview, max_bytes: int) -> AnyFrame:
    """Return the frame that `data` holds.

    Args:
      data: one message part.
      max_bytes: the most that a frame may have on this socket.

    Raises:
      RemoteProtocolError: too long, not msgpack, an unknown tag, a wrong or missing field.
    """
    if len(data) > max_bytes:
        raise RemoteProtocolError(f"frame of {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        raw = msgpack.unpackb(
            data,
            strict_map_key=True,
            use_list=True,
            max_array_len=MAX_ROWS,
            max_map_len=64,
            max_ext_len=0,
            max_str_len=MAX_TEXT * 4,
            max_bin_len=max_bytes,
        )
        frame: AnyFrame = msgspec.convert(raw, AnyFrame, strict=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        # msgspec.ValidationError is a ValueError.
        raise RemoteProtocolError(f"not a frame: {str(error)[:200]}") from error
    return frame

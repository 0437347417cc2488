"""Encode frames as msgpack, and decode them with a check against their schema.

A frame is a msgpack array `[tag, field, ...]` in one message part; KV bytes are in a second part.
The parser follows the schema and stops at the first byte that does not match, before it builds
objects, so a frame never takes more memory than its size. (Parsing first and checking afterwards
turned 16 MiB of nested empty arrays into 1.1 GiB.) Invalid input raises RemoteProtocolError. Class
names and pickles are never sent.

msgpack encodes and msgspec decodes: two implementations that must agree keep the format compatible,
and a peer in another language needs only msgpack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgpack
import msgspec
import structlog

from triolet.errors import LocalProtocolError, RemoteProtocolError
from triolet.ids import shown_identity

from .frames import AnyFrame, Embed, KvChunk, KvManifest, Prefill, Reserve, Welcome, frame_name
from .link import MAX_BAD_FRAMES, LinkMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_NUM_OPTIONAL: Final[Mapping[type[AnyFrame], int]] = {
    Welcome: 1,
    Reserve: 2,
    Prefill: 2,
    KvChunk: 1,
    KvManifest: 1,
    Embed: 1,
}
"""Frames that are sent without trailing fields if these are empty, as on most links. Peers of a
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
    _check_payload(frame, payload, LocalProtocolError)
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
    _check_payload(frame, payload, RemoteProtocolError)
    if payload is not None and payload.nbytes > max_bytes:
        raise RemoteProtocolError(f"payload of {payload.nbytes} bytes; at most {max_bytes}")
    return frame, payload


def _check_payload(
    frame: AnyFrame,
    payload: bytes | memoryview | None,
    error: type[LocalProtocolError | RemoteProtocolError],
) -> None:
    if (payload is not None) != (isinstance(frame, KvChunk) and frame.shared is None):
        raise error(f"{frame_name(frame)}: only a KV_CHUNK has a payload")


log = structlog.get_logger()

MAX_REMEMBERED_SENDERS: Final = 1024
"""Senders of bad frames to remember; beyond this, the oldest entry is forgotten. Routing ids cost a
peer nothing, so this memory needs a bound."""


class FrameGate:
    """Parses the frames of one link and shuts out senders of bad ones.

    Args:
      max_frame_bytes: largest frame allowed.
      before_blame: called before a bad frame counts against its sender, which may be new.

    Attributes:
      received_frames: frames that could be parsed.
      bad_frames: dropped frames, including refused HELLOs and everything from senders shut out.
    """

    def __init__(
        self, max_frame_bytes: int, before_blame: Callable[[], None] | None = None
    ) -> None:
        self.received_frames = 0
        self.bad_frames = 0
        self._max_frame_bytes = max_frame_bytes
        self._before_blame = before_blame
        self._bad_by_sender: dict[bytes, int] = {}

    def admit(self, sender: bytes, parts: Sequence[bytes | memoryview]) -> LinkMessage | None:
        """Return the message, or None if it is dropped.

        Args:
          sender: id of the connection.
          parts: parts of the message.
        """
        if self.is_shut_out(sender):
            self.bad_frames += 1
            return None
        try:
            frame, payload = decode_message(parts, self._max_frame_bytes)
        except RemoteProtocolError as error:
            if self._before_blame is not None:
                self._before_blame()
            self.blame(sender)
            # At most `MAX_BAD_FRAMES` lines per sender: later frames are not parsed.
            log.warning("bad_frame", sender=shown_identity(sender), error=str(error))
            return None
        self.received_frames += 1
        return LinkMessage(sender, frame, payload)

    def is_shut_out(self, sender: bytes) -> bool:
        """Return whether this sender has sent `MAX_BAD_FRAMES` bad frames."""
        return self._bad_by_sender.get(sender, 0) >= MAX_BAD_FRAMES

    def forgive(self, sender: bytes) -> None:
        """Forget the sender's bad frames: a new process may have taken the name."""
        self._bad_by_sender.pop(sender, None)

    def blame(self, sender: bytes) -> None:
        """Count a dropped frame against its sender."""
        self.bad_frames += 1
        if sender not in self._bad_by_sender and (
            len(self._bad_by_sender) >= MAX_REMEMBERED_SENDERS
        ):
            del self._bad_by_sender[next(iter(self._bad_by_sender))]
        self._bad_by_sender[sender] = self._bad_by_sender.get(sender, 0) + 1

"""Frames to bytes and back, and the gate of a link, which drops what is no frame.

A frame is a msgpack array `[tag, field, ...]` in one message part; KV bytes ride in a second part
beside it, never inside. The parser is driven by the schema: it stops at the first byte that does
not fit, before anything is built from it, so that no frame costs more memory than it has bytes.
(Parsing first and checking after turned 16 MiB of nested empty arrays into 1.1 GiB.) Anything that
is no frame is a RemoteProtocolError. No class name and no pickle ever travels.

Written by msgpack, read by msgspec: two implementations that must agree keep the form honest, and a
peer in another language needs nothing but msgpack.
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
"""Frames with last fields that are left out where they are empty: on most links they always are,
and a peer of a release without them understands the frame."""
_DECODER: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


def encode(frame: AnyFrame) -> bytes:
    """Return the wire form of a frame.

    Raises:
      LocalProtocolError: a field does not fit into msgpack: a bug of ours.
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
      max_bytes: the most that a frame may have on this socket.

    Raises:
      RemoteProtocolError: too long, not msgpack, an unknown tag, a wrong or missing field.
    """
    if len(data) > max_bytes:
        raise RemoteProtocolError(f"frame of {len(data)} bytes; at most {max_bytes} are allowed")
    try:
        return _DECODER.decode(data)
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise RemoteProtocolError(f"not a frame: {str(error)[:200]}") from error


def encode_message(frame: AnyFrame, payload: bytes | memoryview | None) -> list[bytes | memoryview]:
    """Return the message parts of a frame and the KV bytes that belong to it.

    Raises:
      LocalProtocolError: a payload where none belongs, or none where one does.
    """
    _check_payload(frame, payload, LocalProtocolError)
    return [encode(frame)] if payload is None else [encode(frame), payload]


def decode_message(
    parts: Sequence[bytes | memoryview], max_bytes: int
) -> tuple[AnyFrame, memoryview | None]:
    """Return frame and payload of received message parts.

    Raises:
      RemoteProtocolError: not one frame with the payload that belongs to it.
    """
    if not 1 <= len(parts) <= 2:
        raise RemoteProtocolError(f"a message has a frame and at most a payload, not {len(parts)}")
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
"""Senders of bad frames that are remembered; beyond, the one that began first is forgotten. Routing
ids cost a peer nothing, so this memory needs a bound."""


class FrameGate:
    """The entrance of one link.

    Args:
      max_frame_bytes: the most that a frame may have.
      before_blame: called before a bad frame is held against its sender, who may be new.

    Attributes:
      received_frames: those that could be parsed.
      bad_frames: those that were dropped, with refused HELLOs and all from senders shut out.
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
        """Return the message that the parts hold, or None if they are dropped.

        Args:
          sender: the id of the connection that they came on.
          parts: of the message.
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
            # At most `MAX_BAD_FRAMES` lines a sender: what comes after is not parsed any more.
            log.warning("bad_frame", sender=shown_identity(sender), error=str(error))
            return None
        self.received_frames += 1
        return LinkMessage(sender, frame, payload)

    def is_shut_out(self, sender: bytes) -> bool:
        """Whether this sender has sent `MAX_BAD_FRAMES` bad ones."""
        return self._bad_by_sender.get(sender, 0) >= MAX_BAD_FRAMES

    def forgive(self, sender: bytes) -> None:
        """Forget the sender's bad frames: a new process may stand behind the same name."""
        self._bad_by_sender.pop(sender, None)

    def blame(self, sender: bytes) -> None:
        """Count a frame that was dropped against its sender."""
        self.bad_frames += 1
        if sender not in self._bad_by_sender and (
            len(self._bad_by_sender) >= MAX_REMEMBERED_SENDERS
        ):
            del self._bad_by_sender[next(iter(self._bad_by_sender))]
        self._bad_by_sender[sender] = self._bad_by_sender.get(sender, 0) + 1

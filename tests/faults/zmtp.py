"""Splits ZMTP 3.1 traffic into messages, for the fault matrix's proxy.

Splits one direction of one connection into pieces that can be forwarded, held, repeated or changed,
each with its exact bytes. Encrypted connections (CURVE) cannot be read, and are not needed on one
machine.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

GREETING_BYTES: Final = 64
MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
MAX_PIECE_BYTES: Final = 256 * 1024 * 1024
"""Far above any frame: more means that this is not ZMTP."""


class NotZmtpError(Exception):
    """The bytes are not what ZeroMQ sends."""


class Kind(Enum):
    """The kind of a piece."""

    GREETING = auto()  # or a part of it
    COMMAND = auto()  # READY, PING, PONG
    MESSAGE = auto()  # all parts of one message


@dataclass(frozen=True, slots=True)
class Piece:
    """A unit that is forwarded as a whole.

    Attributes:
      kind: its kind.
      raw: its bytes on the wire.
      parts: message parts; one body for a command, none for a greeting.
    """

    kind: Kind
    raw: bytes
    parts: tuple[bytes, ...] = ()


class Splitter:
    """Splits one direction of a connection."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeting_bytes = GREETING_BYTES
        self._scanned = 0
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[Piece]:
        """Add bytes; return the pieces that they complete.

        Raises:
          NotZmtpError: the bytes are not ZMTP.
        """
        self._buffer += data
        pieces = []
        while (piece := self._next()) is not None:
            pieces.append(piece)
        return pieces

    def _next(self) -> Piece | None:
        if self._greeting_bytes and self._buffer:
            # Forwarded as it comes: each side sends the rest of its greeting after the other's
            # first bytes.
            num_bytes = min(len(self._buffer), self._greeting_bytes)
            self._greeting_bytes -= num_bytes
            return Piece(Kind.GREETING, self._cut(num_bytes))
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            self._parts.append(body)
            if flags & MORE:
                continue
            parts, self._parts = tuple(self._parts), []
            kind = Kind.COMMAND if flags & COMMAND else Kind.MESSAGE
            return Piece(kind, self._cut(self._scanned), parts)
        return None

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Return flags and body of the next complete frame, without removing it."""
        at = self._scanned
        if len(self._buffer) < at + 2:
            return None
        flags = self._buffer[at]
        if flags & ~(MORE | LONG | COMMAND):
            raise NotZmtpError(f"flags {flags:#x}")
        if flags & LONG:
            if len(self._buffer) < at + 9:
                return None
            (length,) = struct.unpack_from("!Q", self._buffer, at + 1)
            begin = at + 9
        else:
            length, begin = self._buffer[at + 1], at + 2
        if length > MAX_PIECE_BYTES:
            raise NotZmtpError(f"a frame of {length} bytes")
        if len(self._buffer) < begin + length:
            return None
        self._scanned = begin + length
        return flags, bytes(self._buffer[begin : self._scanned])

    def _cut(self, num_bytes: int) -> bytes:
        raw = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        self._scanned = 0
        return raw


def pack_message(parts: list[bytes]) -> bytes:
    """Return the wire form of a message."""
    packed = bytearray()
    for index, part in enumerate(parts):
        flags = MORE if index < len(parts) - 1 else 0
        if len(part) < 256:
            packed += struct.pack("!BB", flags, len(part))
        else:
            packed += struct.pack("!BQ", flags | LONG, len(part))
        packed += part
    return bytes(packed)

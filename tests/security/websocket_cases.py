"""WebSocket conversations for tests, numbered as in the Autobahn suite: the bytes that the client
sends, and how each must end.

The endpoint echoes nothing: each message that is not a valid request gets an error event. So a case
states the expected number of answers, the pongs, and the close code.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.server.support.websocket import (
    BINARY,
    CLOSE,
    CONTINUATION,
    PING,
    PONG,
    TEXT,
    frame_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

KIB: Final = 1024
MIB: Final = 1024 * KIB
BOUND: Final = MIB
"""The server's limit for one message."""
CLEAN: Final = frozenset({1000})
PROTOCOL: Final = frozenset({1002})
NOT_TEXT: Final = frozenset({1007})
TOO_MUCH: Final = frozenset({1008, 1009})
"""Codes for a message too large or in too many pieces, whichever is detected first."""
DROPPED: Final = 0
"""Stands for a connection that ends without a close frame."""
BROKEN_TEXT: Final = "κόσμε".encode() + b"\xf4\x90\x80\x80" + b"edited"
WORDS: Final = "Hello-µ@ßöäüàá-UTF-8!!".encode()


@dataclass(frozen=True, slots=True)
class Case:
    """One conversation.

    Attributes:
      frames: frames that the client sends.
      chop: bytes per write; 0 to send each frame by itself, -1 to send all at once.
      codes: close codes that the server may use.
      answers: number of error events; None for any.
      pongs: payloads of the pongs, in order.
    """

    frames: tuple[bytes, ...]
    codes: frozenset[int] = CLEAN
    chop: int = 0
    answers: int | None = None
    pongs: tuple[bytes, ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether the client closes first."""
        return self.codes is CLEAN and not any(frame[0] & 0xF == CLOSE for frame in self.frames)

    def writes(self) -> list[bytes]:
        """The writes to make; if there are many small pieces, the rest is one write."""
        if self.chop == 0:
            return list(self.frames)
        data = b"".join(self.frames)
        if self.chop < 0:
            return [data]
        pieces = 200
        edge = self.chop * pieces
        cut = [data[at : at + self.chop] for at in range(0, min(edge, len(data)), self.chop)]
        return cut + ([data[edge:]] if len(data) > edge else [])


def close_frame(code: int | None = 1000, reason: bytes = b"") -> bytes:
    """Return a close frame."""
    return frame_bytes(CLOSE, b"" if code is None else struct.pack("!H", code) + reason)


def fragments(payload: bytes, size: int, opcode: int = TEXT) -> tuple[bytes, ...]:
    """Return a message in fragments of this size."""
    parts = [payload[at : at + size] for at in range(0, len(payload), size)] or [b""]
    last = len(parts) - 1
    return tuple(
        frame_bytes(opcode if index == 0 else CONTINUATION, part, fin=index == last)
        for index, part in enumerate(parts)
    )


def _message(opcode: int, size: int, chop: int = 0) -> Case:
    if size > BOUND:
        return Case((frame_bytes(opcode, b"*" * size),), TOO_MUCH, chop)
    return Case((frame_bytes(opcode, b"*" * size),), chop=chop, answers=1)


def _sizes() -> Iterator[tuple[str, Case]]:
    sizes = [0, 125, 126, 127, 128, 65535, 65536]
    for family, opcode in ((1, TEXT), (2, BINARY)):
        for number, size in enumerate(sizes, start=1):
            yield f"1.{family}.{number}", _message(opcode, size)
        yield f"1.{family}.8", _message(opcode, 65536, chop=997)


def _pings() -> Iterator[tuple[str, Case]]:
    long = b"\xfe" * 125
    ten = tuple(b"payload-%d" % index for index in range(10))
    for number, payload in enumerate((b"", b"Hello, world!", b"\0\xff\xfe\xfd\xfc", long), start=1):
        yield f"2.{number}", Case((frame_bytes(PING, payload),), pongs=(payload,), answers=0)
    yield "2.5", Case((frame_bytes(PING, b"\xfe" * 126),), PROTOCOL)
    yield "2.6", Case((frame_bytes(PING, long),), chop=1, pongs=(long,), answers=0)
    yield "2.7", Case((frame_bytes(PONG),), answers=0)
    yield "2.8", Case((frame_bytes(PONG, b"unasked"),), answers=0)
    both = (frame_bytes(PONG, b"unasked"), frame_bytes(PING, b"asked"))
    yield "2.9", Case(both, pongs=(b"asked",), answers=0)
    for number, chop in (("2.10", 0), ("2.11", 1)):
        frames = tuple(frame_bytes(PING, payload) for payload in ten)
        yield number, Case(frames, chop=chop, pongs=ten, answers=0)


def _reserved() -> Iterator[tuple[str, Case]]:
    hello, ping = frame_bytes(TEXT, b"Hello, world!"), frame_bytes(PING)
    yield "3.1", Case((frame_bytes(TEXT, b"Hello", rsv=1),), PROTOCOL)
    for number, rsv, chop in (("3.2", 2, -1), ("3.3", 3, 0), ("3.4", 4, 1)):
        frames = (hello, frame_bytes(TEXT, b"Hello", rsv=rsv), ping)
        yield number, Case(frames, PROTOCOL, chop)
    yield "3.5", Case((frame_bytes(BINARY, b"Hello", rsv=5),), PROTOCOL)
    yield "3.6", Case((frame_bytes(PING, b"Hello", rsv=6),), PROTOCOL)
    yield "3.7", Case((frame_bytes(CLOSE, b"\x03\xe8", rsv=7),), PROTOCOL)
    for family, first in ((1, 3), (2, 11)):
        for number in range(1, 6):
            payload = b"payload" if number in {2, 4} else b""
            bad = frame_bytes(first + number - 1, payload)
            frames = (bad,) if number < 3 else (hello, bad, ping)
            yield f"4.{family}.{number}", Case(frames, PROTOCOL)


def _fragmented() -> Iterator[tuple[str, Case]]:
    for number, opcode in (("5.1", PING), ("5.2", PONG)):
        yield number, Case(fragments(b"ab", 1, opcode), PROTOCOL)
    two = fragments(b"ab", 1)
    for number, chop in (("5.3", -1), ("5.4", 0), ("5.5", 1)):
        yield number, Case(two, chop=chop, answers=1)
    between = (two[0], frame_bytes(PING, b"ping"), two[1])
    for number, chop in (("5.6", -1), ("5.7", 0), ("5.8", 1)):
        yield number, Case(between, chop=chop, answers=1, pongs=(b"ping",))
    hello = frame_bytes(TEXT, b"Hello, world!")
    for first, is_final in ((9, True), (12, False)):
        stray = frame_bytes(CONTINUATION, b"stray", fin=is_final)
        for offset, chop in enumerate((-1, 0, 1)):
            yield f"5.{first + offset}", Case((stray, hello), PROTOCOL, chop)
    loose = frame_bytes(CONTINUATION, b"stray", fin=False)
    yield "5.15", Case((*two, loose, hello), PROTOCOL, -1)
    yield "5.16", Case((loose, *two) * 2, PROTOCOL)
    yield "5.17", Case((frame_bytes(CONTINUATION, b"stray"), *two) * 2, PROTOCOL)
    yield "5.18", Case((two[0], frame_bytes(TEXT, b"b")), PROTOCOL, -1)
    five = fragments(b"abcde", 1)
    pinged = (
        *five[:2], frame_bytes(PING, b"1"), *five[2:4], frame_bytes(PING, b"2"), five[4],
    )  # fmt: skip
    for number, chop in (("5.19", 0), ("5.20", 1)):
        yield number, Case(pinged, chop=chop, answers=1, pongs=(b"1", b"2"))


def _texts() -> Iterator[tuple[str, Case]]:
    yield "6.1.1", Case((frame_bytes(TEXT),), answers=1)
    empty = (
        frame_bytes(TEXT, fin=False),
        frame_bytes(CONTINUATION, fin=False),
        frame_bytes(CONTINUATION),
    )
    yield "6.1.2", Case(empty, answers=1)
    middle = (empty[0], frame_bytes(CONTINUATION, b"middle", fin=False), empty[2])
    yield "6.1.3", Case(middle, answers=1)
    yield "6.2.1", Case((frame_bytes(TEXT, WORDS),), answers=1)
    yield "6.2.2", Case(fragments(WORDS, 8), answers=1)
    yield "6.2.3", Case(fragments(WORDS, 1), answers=1)
    yield "6.2.4", Case(fragments("κόσμε".encode(), 1), answers=1)
    yield "6.3.1", Case((frame_bytes(TEXT, BROKEN_TEXT),), NOT_TEXT)
    yield "6.3.2", Case(fragments(BROKEN_TEXT, 1), NOT_TEXT)
    # The first 10 bytes are valid; the text is certainly invalid at the 12th.
    for number, at in (("6.4.1", 14), ("6.4.2", 12)):
        parts = (BROKEN_TEXT[:10], BROKEN_TEXT[10:at])
        frames = (
            frame_bytes(TEXT, parts[0], fin=False),
            frame_bytes(CONTINUATION, parts[1], fin=False),
        )
        yield number, Case(frames, NOT_TEXT)
    for number, at in (("6.4.3", 14), ("6.4.4", 12)):
        whole = frame_bytes(TEXT, BROKEN_TEXT)
        head = len(whole) - len(BROKEN_TEXT)
        yield number, Case((whole[: head + at],), NOT_TEXT, chop=head + 10)


def _closes() -> Iterator[tuple[str, Case]]:
    hello, bye = frame_bytes(TEXT, b"Hello"), close_frame()
    yield "7.1.1", Case((hello, bye))
    yield "7.1.2", Case((bye, bye), chop=-1)
    yield "7.1.3", Case((bye, frame_bytes(PING)), chop=-1)
    yield "7.1.4", Case((bye, hello), chop=-1)
    parts = fragments(b"ab", 1)
    yield "7.1.5", Case((parts[0], bye, parts[1]), chop=-1)
    yield "7.1.6", Case((frame_bytes(TEXT, b"*" * 256 * KIB), bye, frame_bytes(PING)), chop=-1)
    plain = frozenset({1000, 1005})
    bad = PROTOCOL | {DROPPED}
    yield "7.3.1", Case((close_frame(None),), plain)
    yield "7.3.2", Case((frame_bytes(CLOSE, b"\x03"),), bad)
    yield "7.3.3", Case((bye,))
    yield "7.3.4", Case((close_frame(1000, b"Hello"),))
    yield "7.3.5", Case((close_frame(1000, b"*" * 123),))
    yield "7.3.6", Case((close_frame(1000, b"*" * 124),), bad)
    yield "7.5.1", Case((close_frame(1000, BROKEN_TEXT),), bad | NOT_TEXT)
    good = (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999)
    for code in good:
        yield f"7.7.X/{code}", Case((close_frame(code),), frozenset({1000, code}))
    for code in (0, 999, 1004, 1005, 1006, 1016, 1100, 2000, 2999):
        yield f"7.9.X/{code}", Case((close_frame(code),), bad)
    for number, code in (("7.13.1", 5000), ("7.13.2", 65535)):
        yield number, Case((close_frame(code),), bad | {1000, code})


def _large() -> Iterator[tuple[str, Case]]:
    sizes = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 8 * MIB, 16 * MIB)
    pieces = (64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
    for family, opcode in ((1, TEXT), (2, BINARY)):
        for number, size in enumerate(sizes, start=1):
            yield f"9.{family}.{number}", _message(opcode, size)
    for family, opcode in ((3, TEXT), (4, BINARY)):
        for number, piece in enumerate(pieces, start=1):
            # What follows after the limit, by size or by number, is not read.
            size = min(4 * MIB, 2000 * piece)
            codes = TOO_MUCH
            yield f"9.{family}.{number}", Case(fragments(b"*" * size, piece, opcode), codes, -1)
    for family, opcode in ((5, TEXT), (6, BINARY)):
        for number, chop in enumerate((64, 128, 256, 512, 1024, 2048), start=1):
            yield f"9.{family}.{number}", _message(opcode, MIB, chop)
    for opcode in (TEXT, BINARY):
        for size in (0, 16, 64, 256, KIB, 4 * KIB):
            frames = (frame_bytes(opcode, b"*" * size),) * 20
            yield f"9.7.X/{opcode}-{size}", Case(frames, answers=20)
    endless = fragments(b"*" * 8 * MIB, 4 * KIB)
    yield "9.9.1", Case(endless, TOO_MUCH, -1)
    yield "10.1.1", Case(fragments(b"*" * 65536, 1300), answers=1)
    yield "12.x.x", Case((frame_bytes(TEXT, b"\xf2\x48\xcd\xc9\xc9\x07\0", rsv=4),), PROTOCOL)


CASES: Final = {
    number: case
    for family in (_sizes, _pings, _reserved, _fragmented, _texts, _closes, _large)
    for number, case in family()
}

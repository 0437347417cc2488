"""Serializes plain values to bytes and back, in pieces between which the server does other work.

Packing a conversation of thousands of messages in one call would hold the interpreter lock for tens
of milliseconds. So lists are packed some elements at a time, and data is unpacked as it arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgpack

from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


PIECE_ITEMS: Final = 256
"""List elements packed at once: messages take some 0.3 µs each, larger ones more."""
PIECE_BYTES: Final = 64 * 1024
"""Bytes received and unpacked at once: a pipe's capacity. Lists are packed in steps of this size
plus one element."""
MAX_BYTES: Final = 256 * MIB
"""Maximum size of a message: twice what a template may render from the largest body."""
_SURROGATES: Final = "surrogatepass"
"""Strings with lone surrogates are sent unchanged; the receiver refuses them."""


def _long_integer(value: object) -> msgpack.ExtType:
    """Return an integer of more than 64 bits, which msgpack cannot represent."""
    assert isinstance(value, int), "only integers are passed here"
    return msgpack.ExtType(0, str(value).encode())


def pieces_of(values: Sequence[object]) -> Iterator[bytes | memoryview]:
    """Yield a message with some values: JSON types and bytes."""
    packer = msgpack.Packer(default=_long_integer, unicode_errors=_SURROGATES)
    yield packer.pack_array_header(len(values))
    for value in values:
        if isinstance(value, bytes | bytearray):
            # In msgpack's format, but without copying the whole.
            yield b"\xc6" + len(value).to_bytes(4, "big")
            view = memoryview(value)
            yield from (view[at : at + PIECE_BYTES] for at in range(0, len(value), PIECE_BYTES))
            continue
        if not isinstance(value, list | tuple):
            yield packer.pack(value)
            continue
        yield packer.pack_array_header(len(value))
        gathered: list[bytes] = []
        size = 0
        for item in value:
            gathered.append(packer.pack(item))
            size += len(gathered[-1])
            if size >= PIECE_BYTES or len(gathered) == PIECE_ITEMS:
                yield b"".join(gathered)
                gathered.clear()
                size = 0
        yield b"".join(gathered)


class Reader:
    """Parses messages as they arrive."""

    def __init__(self) -> None:
        self._unpacker = msgpack.Unpacker(
            ext_hook=lambda _, digits: int(digits),
            strict_map_key=False,
            unicode_errors=_SURROGATES,
            max_buffer_size=MAX_BYTES,
        )

    def feed(self, data: bytes | bytearray) -> list[Any] | None:
        """Add received data; return the values of a message if it is complete.

        Raises:
          ValueError: it is malformed, or longer than MAX_BYTES.
        """
        try:
            self._unpacker.feed(data)
            values: list[Any] = self._unpacker.unpack()
        except msgpack.OutOfData:
            return None
        except msgpack.BufferFull as error:
            raise ValueError(f"a message is longer than {MAX_BYTES} bytes") from error
        return values

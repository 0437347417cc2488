"""The file of a snapshot: pieces of packed weights end to end, then a list of them, then a mark.

Each load reads every byte and compares digests, so a file that is torn, cut or flipped anywhere is
found: 128 bits of xxh3, which read memory faster than a decode step does. They stand against damage
and mix-ups, not against forgery: only files of this user that no other user may write are read.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
import xxhash

from triolet.errors import TrioletError

from ..native.pieces import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable

MAGIC: Final = b"TRIOPAK1"
ALIGNMENT: Final = 4096
"""Of a piece: kernels read whole cache lines, and pages are mapped."""
MAX_LIST_BYTES: Final = 16 * 2**20
"""Of the list of pieces: a hundred bytes a piece, some twenty pieces a layer."""
_TAIL: Final = struct.Struct("<Q16s8s")
"""Bytes of the list, their digest, the mark."""


class SnapshotDamagedError(TrioletError):
    """A file is no snapshot, or no whole one, or one of something else."""


class SnapshotKey(msgspec.Struct, frozen=True):
    """What the bytes of packed weights depend on.

    Attributes:
      weights: digest of the model's own weights.
      place: of their files. That digest can be forged; in a store the place cannot be.
      shape: digest of the model's configuration.
      dtype: that is computed in.
      format: that weights are kept in.
      kernels: build and digest of the library that packed them, and digest of the code around it.
    """

    weights: str
    place: str
    shape: str
    dtype: str
    format: str
    kernels: str

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{xxhash.xxh3_128(msgspec.json.encode(self)).hexdigest()}.packed"


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """Where one piece lies. See Piece."""

    name: str
    offset: int
    num_bytes: int
    panels: int
    steps: int


class _List(msgspec.Struct, frozen=True):
    """What stands behind the pieces.

    Attributes:
      key: what they are.
      digest: of everything before this list.
      entries: the pieces.
    """

    key: SnapshotKey
    digest: str
    entries: tuple[_Entry, ...]


def write_snapshot(fd: int, key: SnapshotKey, pieces: Iterable[tuple[str, Piece]]) -> int:
    """Write a snapshot into an empty file and return its size.

    Raises:
      OSError: it cannot be written to its end.
    """
    digest = xxhash.xxh3_128()
    entries: list[_Entry] = []
    end = 0
    with open(fd, "wb", buffering=0, closefd=False) as file:
        for name, piece in pieces:
            data = piece.data
            entries.append(_Entry(name, end, len(data), piece.panels, piece.steps))
            for part in (data.data, memoryview(bytes(-len(data) % ALIGNMENT))):
                digest.update(part)
                _write_all(file.fileno(), part)
                end += len(part)
        listed = msgspec.json.encode(_List(key, digest.hexdigest(), tuple(entries)))
        tail = _TAIL.pack(len(listed), xxhash.xxh3_128(listed).digest(), MAGIC)
        _write_all(file.fileno(), memoryview(listed + tail))
    return end + len(listed) + len(tail)


def map_snapshot(fd: int, key: SnapshotKey) -> dict[str, Piece]:
    """Map a snapshot for reading and return its pieces; they last as long as any of them.

    Args:
      fd: the file; may be closed afterwards.
      key: what it has to hold.

    Raises:
      SnapshotDamagedError: it does not, or not whole.
      OSError: it cannot be mapped.
    """
    size = os.fstat(fd).st_size
    if size < _TAIL.size:
        raise SnapshotDamagedError(f"it has {size} bytes, fewer than any snapshot")
    memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    num_listed, list_digest, magic = _TAIL.unpack_from(memory, size - _TAIL.size)
    first = size - _TAIL.size - num_listed
    if magic != MAGIC or num_listed > MAX_LIST_BYTES or first < 0:
        raise SnapshotDamagedError("its end is not that of a snapshot: it is cut, or another file")
    whole = memoryview(memory)
    encoded = whole[first : first + num_listed]
    if xxhash.xxh3_128(encoded).digest() != list_digest:
        raise SnapshotDamagedError("the list of its pieces is damaged")
    try:
        listed = msgspec.json.decode(encoded, type=_List)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SnapshotDamagedError(f"the list of its pieces cannot be read: {error}") from error
    if listed.key != key:
        raise SnapshotDamagedError(f"it holds {listed.key}, not {key}")
    if any(one.offset < 0 or one.offset + one.num_bytes > first for one in listed.entries):
        raise SnapshotDamagedError("a piece lies beyond its end")
    if xxhash.xxh3_128(whole[:first]).hexdigest() != listed.digest:
        raise SnapshotDamagedError("its weights are damaged")
    return {
        one.name: Piece(
            np.frombuffer(memory, dtype=np.uint8, count=one.num_bytes, offset=one.offset),
            one.panels,
            one.steps,
        )
        for one in listed.entries
    }


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]

"""Write and map a snapshot file: the pieces of packed weights, a list of them, an end mark.

Each load reads every byte and compares digests (128 bits of xxh3, faster than a decode step reads
memory), so truncated or damaged files are detected. Digests do not protect against forgery: for
that, only files of this user that no other user can write are read.
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
"""Alignment of a piece: kernels read whole cache lines, and pages are mapped."""
MAX_LIST_BYTES: Final = 16 * 2**20
"""Largest list of pieces: a hundred bytes per piece, about twenty pieces per layer."""
_TAIL: Final = struct.Struct("<Q16s8s")
"""Trailer: length of the list, its digest, the end mark."""


class SnapshotDamagedError(TrioletError):
    """A file is not a snapshot, is damaged, or holds other weights."""


class SnapshotKey(msgspec.Struct, frozen=True):
    """What the bytes of packed weights depend on.

    Attributes:
      weights: digest of the model's weights.
      place: path of the weight files. The digest can be forged; a path in a store cannot.
      shape: digest of the model's configuration.
      dtype: dtype of the computation.
      format: format in which weights are kept.
      kernels: build and digest of the packing library, and digest of the code that calls it.
    """

    weights: str
    place: str
    shape: str
    dtype: str
    format: str
    kernels: str

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{xxhash.xxh3_128(msgspec.json.encode(self)).hexdigest()}.packed"


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """Offset and fields of one piece. See Piece."""

    name: str
    offset: int
    num_bytes: int
    panels: int
    steps: int


class _List(msgspec.Struct, frozen=True):
    """The list after the pieces.

    Attributes:
      key: the snapshot's key.
      digest: digest of everything before this list.
      entries: the pieces.
    """

    key: SnapshotKey
    digest: str
    entries: tuple[_Entry, ...]


def write_snapshot(fd: int, key: SnapshotKey, pieces: Iterable[tuple[str, Piece]]) -> int:
    """Write a snapshot into an empty file and return its size.

    Raises:
      OSError: writing failed.
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
    """Map a snapshot for reading and return its pieces. The mapping lasts as long as any piece.

    Args:
      fd: the file; may be closed afterwards.
      key: the expected key.

    Raises:
      SnapshotDamagedError: the file is damaged, or has another key.
      OSError: the file cannot be mapped.
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

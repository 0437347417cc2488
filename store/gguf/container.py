"""Parse the container of a GGUF file: its metadata and table of tensors.

Source: the GGUF specification of ggml (versions 2 and 3, little-endian). Every count and length is
checked against the file's size before it is used, so a broken file costs no memory.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from triolet.errors import ModelError
from triolet.units import MIB

from ..model_dir.bounded import MAX_TENSORS, opened

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Scalar: TypeAlias = "int | float | bool | str"
Value: TypeAlias = "Scalar | list[Scalar]"

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
REMEDY: Final = "fetch the file again"
MAX_METADATA_BYTES: Final = 256 * MIB
"""Size of everything before the numbers: the largest vocabularies take 30 MB."""
MAX_KEYS: Final = 10_000
"""Keys of metadata; real models have about forty."""
MAX_ELEMENTS: Final = 4_000_000
"""Elements of an array: eight times the merges of the largest vocabulary."""
MAX_DIMENSIONS: Final = 4
"""Dimensions of a tensor, as in ggml."""
DEFAULT_ALIGNMENT: Final = 32
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING: Final = 8
_LENGTH: Final = struct.Struct("<Q")
_ARRAY: Final = 9


class Encoding(NamedTuple):
    """A storage format of numbers.

    Attributes:
      name: name in llama.cpp.
      block_numbers: numbers in a block.
      block_bytes: bytes of a block.
    """

    name: str
    block_numbers: int
    block_bytes: int


ENCODINGS: Final = {
    0: Encoding("F32", 1, 4),
    1: Encoding("F16", 1, 2),
    2: Encoding("Q4_0", 32, 18),
    3: Encoding("Q4_1", 32, 20),
    6: Encoding("Q5_0", 32, 22),
    7: Encoding("Q5_1", 32, 24),
    8: Encoding("Q8_0", 32, 34),
    10: Encoding("Q2_K", 256, 84),
    11: Encoding("Q3_K", 256, 110),
    12: Encoding("Q4_K", 256, 144),
    13: Encoding("Q5_K", 256, 176),
    14: Encoding("Q6_K", 256, 210),
    20: Encoding("IQ4_NL", 32, 18),
    23: Encoding("IQ4_XS", 256, 136),
    30: Encoding("BF16", 1, 2),
}
"""By number in a file; other encodings cannot be loaded."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of a file.

    Attributes:
      shape: rows first, as in torch (the file has the opposite order).
      encoding: a key of ENCODINGS.
      start: offset of its first byte in the file.
      num_bytes: size in the file.
    """

    shape: tuple[int, ...]
    encoding: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The part of a file before the numbers.

    Attributes:
      path: path of the file.
      metadata: value of every key.
      tensors: tensors by name.
      header_digest: SHA-256 of everything before the tensors' numbers.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorPlace]
    header_digest: str

    @property
    def num_numbers(self) -> Counter[str]:
        """Count of numbers by the name of their encoding."""
        found: Counter[str] = Counter()
        for place in self.tensors.values():
            found[ENCODINGS[place.encoding].name] += prod(place.shape)
        return found

    @property
    def encoding(self) -> str:
        """Name of the most frequent encoding in llama.cpp: F32, BF16, Q4_1 …"""
        found = self.num_numbers.most_common(1)
        return found[0][0] if found else "F32"


def read_gguf(path: Path) -> GgufFile:
    """Read a file's metadata and table of tensors.

    Raises:
      ModelError: the file is not GGUF, is truncated or broken, or cannot be loaded; the message
        names the file, the position and what was expected there.
    """
    try:
        with (
            opened(path, REMEDY) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _parse(path, data)
    except ValueError as error:  # mmap of an empty file
        raise ModelError(f"{path} is empty; {REMEDY}") from error


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(path, data)
    magic = cursor.take(4, "the magic bytes 'GGUF'")
    if magic != MAGIC:
        raise ModelError(
            f"{path} does not begin with the letters GGUF: it is not a GGUF file; {REMEDY}"
        )
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        kind = "big-endian" if version >> 16 else f"of version {version}"
        raise ModelError(
            f"{path} is {kind}; supported: little-endian files of version 2 or 3: convert the "
            "model again with a current llama.cpp"
        )
    num_tensors = cursor.count("tensors", 24, MAX_TENSORS)
    num_keys = cursor.count("keys of metadata", 13, MAX_KEYS)
    metadata: dict[str, Value] = {}
    for _ in range(num_keys):
        key = cursor.string("a key of metadata")
        metadata[key] = cursor.value(cursor.number("<I", f"the type of {key}"), key)
    parts = metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise ModelError(
            f"{path} is one of {parts} parts (split.count); join them first: "
            "llama-gguf-split --merge FIRST_PART OUTPUT"
        )
    table = [cursor.tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ModelError(f"{path}: general.alignment is {alignment!r}, not a power of 2; {REMEDY}")
    start = -(-cursor.position // alignment) * alignment
    digest = hashlib.sha256(data[: cursor.position]).hexdigest()
    tensors: dict[str, TensorPlace] = {}
    for name, shape, encoding, offset in table:
        if name in tensors:
            raise ModelError(f"{path}: tensor {name} occurs twice; {REMEDY}")
        tensors[name] = _place(path, len(data), name, shape, encoding, start + offset)
    return GgufFile(path, metadata, tensors, digest)


def _place(
    path: Path, size: int, name: str, shape: tuple[int, ...], encoding: int, start: int
) -> TensorPlace:
    """Return the place of a tensor, once it is known to lie within the file."""
    found = ENCODINGS.get(encoding)
    if found is None:
        supported = ", ".join(each.name for each in ENCODINGS.values())
        raise ModelError(
            f"{path}: tensor {name} is of ggml type {encoding}, which is not supported; supported: "
            f"{supported}; convert the model to one of these with llama-quantize"
        )
    if not shape or shape[-1] % found.block_numbers or min(shape) < 1:
        raise ModelError(
            f"{path}: tensor {name} is {found.name} {list(shape)}, whose rows are not whole blocks "
            f"of {found.block_numbers}; {REMEDY}"
        )
    num_bytes = prod(shape) // found.block_numbers * found.block_bytes
    if start + num_bytes > size:
        raise ModelError(
            f"{path} is cut off: tensor {name} lies at bytes {start} to {start + num_bytes}, the "
            f"file ends at {size}; {REMEDY}"
        )
    return TensorPlace(shape, encoding, start, num_bytes)


class _Cursor:
    """Reads consecutive values from a file.

    Args:
      path: for errors.
      data: the whole file; at most MAX_METADATA_BYTES of it are read.

    Attributes:
      position: position of the next byte.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = min(len(data), MAX_METADATA_BYTES)
        self.position = 0

    def take(self, num_bytes: int, what: str) -> bytes:
        """Return the next bytes."""
        start = self.position
        if num_bytes > self._size - start:
            raise ModelError(
                f"{self._path} is cut off or broken: {what} at byte {start} has {num_bytes} bytes, "
                f"{self._size - start} are left; {REMEDY}"
            )
        self.position = start + num_bytes
        return self._data[start : self.position]

    def number(self, form: str, what: str) -> int:
        """Read an integer in one of struct's formats."""
        return int(struct.unpack(form, self.take(struct.calcsize(form), what))[0])

    def count(self, what: str, least_bytes: int, most: int) -> int:
        """Read a count of items that take at least `least_bytes` each."""
        start = self.position
        count = self.number("<Q", f"the number of {what}")
        if count * least_bytes > self._size - self.position:
            raise ModelError(
                f"{self._path} is cut off or broken: {count} {what} are announced at byte {start}, "
                f"{self._size - self.position} bytes are left; {REMEDY}"
            )
        if count > most:
            raise ModelError(
                f"{self._path}: {count} {what} are announced at byte {start}; allowed: up to "
                f"{most}; {REMEDY}"
            )
        return count

    def string(self, what: str) -> str:
        """Read a string."""
        start = self.position
        return self._text(self.take(self.number("<Q", f"the length of {what}"), what), start, what)

    def _text(self, taken: bytes, start: int, what: str) -> str:
        try:
            return taken.decode()
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self._path}: {what} at byte {start} is not UTF-8; {REMEDY}"
            ) from error

    def value(self, kind: int, key: str) -> Value:
        """Read the value of a key."""
        if kind == _STRING:
            return self.string(key)
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], key)
        if kind != _ARRAY:
            raise self._unknown(kind, key)
        inner = self.number("<I", f"the type of {key}'s elements")
        if inner == _STRING:
            return self._strings(key)
        if inner not in _SCALARS:  # arrays of arrays are valid, but no model uses them
            raise self._unknown(inner, key)
        form = _SCALARS[inner]
        num_values = self.count(f"elements of {key}", struct.calcsize(form), MAX_ELEMENTS)
        taken = self.take(num_values * struct.calcsize(form), key)
        return list(struct.unpack(f"<{num_values}{form[1:]}", taken))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the next entry of the tensor table: name, shape, encoding and offset."""
        name = self.string("a tensor's name")
        dimensions = self.number("<I", f"the number of dimensions of {name}")
        if dimensions > MAX_DIMENSIONS:
            raise ModelError(
                f"{self._path}: tensor {name} has {dimensions} dimensions at byte "
                f"{self.position - 4}; allowed: up to {MAX_DIMENSIONS}; {REMEDY}"
            )
        shape = struct.unpack(f"<{dimensions}Q", self.take(8 * dimensions, f"the shape of {name}"))
        encoding = self.number("<I", f"the type of {name}")
        return name, shape[::-1], encoding, self.number("<Q", f"the place of {name}")

    def _strings(self, key: str) -> Value:
        """Read an array of strings. A vocabulary has hundreds of thousands of them, so each one
        takes as few calls as possible."""
        what, found = f"an element of {key}", list[Scalar]()
        data, size, length_at = self._data, self._size, _LENGTH.unpack_from
        for _ in range(self.count(f"elements of {key}", 8, MAX_ELEMENTS)):
            start = self.position + 8
            end = start + length_at(data, self.position)[0] if start <= size else start
            if end > size:
                self.string(what)  # raises the error
            found.append(self._text(data[start:end], self.position, what))
            self.position = end
        return found

    def _scalar(self, form: str, what: str) -> int | float | bool:
        taken: int | float | bool
        (taken,) = struct.unpack(form, self.take(struct.calcsize(form), what))
        return taken

    def _unknown(self, kind: int, key: str) -> ModelError:
        return ModelError(
            f"{self._path}: {key} has a value of the unknown type {kind} at byte {self.position}; "
            f"{REMEDY}"
        )

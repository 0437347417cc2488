"""Read headers of safetensors files: their tensors with dtype and shape."""

from __future__ import annotations

import os
import re
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from triolet.errors import ModelError

from .bounded import HEADER, MAX_TENSORS, opened, parse_json, read_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_SHARD_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}\.safetensors")
MAX_DIMENSIONS: Final = 8
"""Dimensions of a tensor; weights have one or two."""
REMEDY: Final = "fetch the file again"
ITEM_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
"""Bytes per number, by the format's names. The length of other dtypes is not checked."""


class StoredTensor(NamedTuple):
    """A tensor as described in a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(model_dir: Path) -> list[Path]:
    """Return a model's safetensors files, sorted by name.

    Raises:
      ModelError: there are none, or the index names one that is missing or lies elsewhere.
    """
    index = model_dir / INDEX_FILE
    if not index.exists():
        if not (model_dir / SINGLE_FILE).exists():
            raise ModelError(
                f"{model_dir / SINGLE_FILE} is missing (and so is {INDEX_FILE}); give the path of "
                "a complete directory with weights in safetensors form"
            )
        return [model_dir / SINGLE_FILE]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; fetch the file again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not _SHARD_NAME.fullmatch(name):
            raise ModelError(
                f"{index} names {name!r}, which is not a plain *.safetensors file name; fetch it "
                "again"
            )
        if not (model_dir / name).exists():
            raise ModelError(f"{model_dir / name} is missing, {INDEX_FILE} names it; fetch it")
    return [model_dir / name for name in names]


def read_headers(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return every tensor of several files by name.

    Raises:
      ModelError: a file cannot be read, is incomplete, or repeats a tensor of another one.
    """
    found: dict[str, StoredTensor] = {}
    for path in files:
        for name, stored in read_header(path).items():
            if name in found:
                raise ModelError(
                    f"{path}: tensor {name} is in {found[name].path.name} as well; "
                    "fetch the files again"
                )
            found[name] = stored
        _require_few(path, len(found))
    return found


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file by name.

    Raises:
      ModelError: it cannot be read, is not a safetensors file, or its length does not match its
        header.
    """
    with opened(path, REMEDY) as file:
        fields, num_bytes = _fields(path, file, os.fstat(file.fileno()).st_size)
    _require_few(path, len(fields))
    tensors, end = {}, 0
    for name, value in fields.items():
        if name == "__metadata__":
            continue
        try:
            stored, first, last = _entry(path, value)
        except (LookupError, TypeError, ValueError) as error:
            raise ModelError(
                f"{path} has a broken header: tensor {name}: {error}; fetch the file again"
            ) from error
        tensors[name] = stored
        end = max(end, last)
        size = ITEM_BYTES.get(stored.dtype)
        if size is not None and last - first != prod(stored.shape) * size:
            raise ModelError(
                f"{path} has a broken header: tensor {name} is {stored.dtype} "
                f"{list(stored.shape)} in {last - first} bytes; fetch the file again"
            )
    if end != num_bytes:
        raise ModelError(
            f"{path} has {num_bytes} bytes of weights, its header says {end}; fetch the file again"
        )
    return tensors


def _fields(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """Return the header's object, and the number of bytes after it."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little") if len(prefix) == 8 else 0
    if not 2 <= length <= min(HEADER.num_bytes, size - 8):
        raise ModelError(
            f"{path} is not a safetensors file, or is truncated; fetch the file again (a "
            "file of a few hundred bytes is a pointer of Git LFS: git lfs pull; a header may have "
            f"up to {HEADER.num_bytes} bytes)"
        )
    fields = parse_json(f"the header of {path}", file.read(length), HEADER.num_values, REMEDY)
    if not isinstance(fields, dict):
        raise ModelError(f"{path} has a broken header: not a JSON object; fetch the file again")
    return fields, size - 8 - length


def _entry(path: Path, value: Any) -> tuple[StoredTensor, int, int]:  # noqa: ANN401 (from JSON)
    dtype, shape, (first, last) = value["dtype"], value["shape"], value["data_offsets"]
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"{len(shape)} dimensions; allowed: up to {MAX_DIMENSIONS}")
    numbers = [*shape, first, last]
    if not all(type(number) is int and number >= 0 for number in numbers) or last < first:
        raise ValueError(f"shape {shape} at {[first, last]}")
    return StoredTensor(path, str(dtype), tuple(shape)), first, last


def _require_few(path: Path, count: int) -> None:
    if count > MAX_TENSORS:
        raise ModelError(
            f"{path}: the number of tensors is {count}; allowed: up to {MAX_TENSORS}; {REMEDY}"
        )

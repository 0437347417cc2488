"""Headers of safetensors files: which tensors they hold, of which dtype and shape."""

from __future__ import annotations

import json
import os
import re
import stat
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from triolet.errors import ModelError

from ..model_config import read_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
_SHARD_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,128}\.safetensors")
MAX_HEADER_BYTES: Final = 100_000_000
"""What the safetensors format allows."""
ITEM_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
"""By the names of the format. A dtype that is not here has an unchecked length."""


class Stored(NamedTuple):
    """A tensor as a file describes it."""

    path: Path
    dtype: str
    shape: tuple[int, ...]


def weight_files(model_dir: Path) -> list[Path]:
    """Return the safetensors files of a model, sorted by name.

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
                f"{index} names {name!r}, which is no plain *.safetensors file name; fetch it again"
            )
        if not (model_dir / name).exists():
            raise ModelError(f"{model_dir / name} is missing, {INDEX_FILE} names it; fetch it")
    return [model_dir / name for name in names]


def read_headers(files: Sequence[Path]) -> dict[str, Stored]:
    """Return every tensor of some files by its name.

    Raises:
      ModelError: a file cannot be read, is not whole, or holds a tensor of another one.
    """
    found: dict[str, Stored] = {}
    for path in files:
        for name, stored in read_header(path).items():
            if name in found:
                raise ModelError(
                    f"{path}: tensor {name} is in {found[name].path.name} as well; "
                    "fetch the files again"
                )
            found[name] = stored
    return found


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of one file by their names.

    Raises:
      ModelError: it cannot be read, is no safetensors file, or is shorter or longer than its header
        says.
    """
    try:
        # A pipe in place of a file must not be waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ModelError(f"{path} is no ordinary file; fetch the file again")
            fields, num_bytes = _fields(path, file, found.st_size)
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror or error}; let this user read it, or fetch "
            "the file again"
        ) from error
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
    """Return the header's object, and the number of bytes behind it."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little") if len(prefix) == 8 else 0
    if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
        raise ModelError(
            f"{path} is no safetensors file, or only the start of one; fetch the file again (a "
            "file of a few hundred bytes is a pointer of Git LFS: git lfs pull)"
        )
    try:
        fields = json.loads(file.read(length))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} has a broken header: {error}; fetch the file again") from error
    if not isinstance(fields, dict):
        raise ModelError(f"{path} has a broken header: no JSON object; fetch the file again")
    return fields, size - 8 - length


def _entry(path: Path, value: Any) -> tuple[Stored, int, int]:  # noqa: ANN401 (from JSON)
    dtype, shape, (first, last) = value["dtype"], value["shape"], value["data_offsets"]
    numbers = [*shape, first, last]
    if not all(type(number) is int and number >= 0 for number in numbers) or last < first:
        raise ValueError(f"shape {shape} at {[first, last]}")
    return Stored(path, str(dtype), tuple(shape)), first, last

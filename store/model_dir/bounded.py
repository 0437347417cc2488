"""Read files of a model's or adapter's directory within bounds. All such reads go through here.

Such directories are downloaded from strangers. Reads never wait (for a pipe or device) and never
exceed a number of bytes; JSON never exceeds a number of objects; numbers that set sizes are checked
against ranges; and a check of the whole directory has a deadline.
"""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from triolet.errors import ModelError
from triolet.units import KIB, MIB, SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

REMEDY: Final = "give the path of a complete Hugging Face directory, or download it again"
CHECK_S: Final = 10.0 * SECONDS
"""For a check of a whole directory: the largest tokenizers take a second, a slow disk a few."""
MAX_TENSORS: Final = 200_000
"""Tensors of a model. The largest ones with experts and separate scales have 90,000."""
MAX_TEMPLATE_BYTES: Final = 128 * KIB
"""Characters of all chat templates. The longest have 20,000; jinja2 compiles a hostile one of this
size in two seconds, in a thread that cannot be stopped."""


class Bound(NamedTuple):
    """Limits for one kind of file.

    Attributes:
      num_bytes: maximum size of the file.
      num_values: maximum number of JSON values; each takes up to a hundred bytes once parsed.
    """

    num_bytes: int
    num_values: int


DOCUMENT: Final = Bound(8 * MIB, 1_000_000)
"""For files without an entry in `BOUNDS`. The largest known tokenizer_config.json has 1.2 MB."""
BOUNDS: Final[Mapping[str, Bound]] = {
    # 262,144 tokens with 514,906 merges take 33 MB and 2 million values.
    "tokenizer.json": Bound(128 * MIB, 6_000_000),
    # A name of 100 bytes and a file for each tensor.
    "model.safetensors.index.json": Bound(32 * MIB, 2 * MAX_TENSORS),
}
HEADER: Final = Bound(48 * MIB, 9 * MAX_TENSORS)
"""Header of a safetensors file: 90 bytes and 8 values per two-dimensional tensor."""
RANGES: Final[Mapping[str, int]] = {
    name: most
    for most, *names in (
        (1_000, "num_hidden_layers", "block_count"),  # 126 in Llama 3.1 405B
        (4_096, "num_attention_heads", "attention.head_count"),  # 128
        (4_096, "num_key_value_heads", "attention.head_count_kv"),  # 128
        (8_192, "head_dim", "attention.key_length", "attention.value_length"),  # 256
        (8_192, "rope.dimension_count"),  # 256
        (1 << 20, "hidden_size", "embedding_length"),  # 16,384
        (1 << 22, "intermediate_size", "feed_forward_length"),  # 53,248
        (1 << 22, "vocab_size", "eos_token_id"),  # 262,144
        (1 << 30, "max_position_embeddings", "context_length"),  # 10,485,760 in Llama 4 Scout
        (1 << 30, "attention.sliding_window"),
    )
    for name in names
}
"""Largest allowed numbers in config.json or a GGUF file, with the largest known of a real model in
the comment; each is at least 1."""

_check_ends: ContextVar[tuple[Callable[[], float], float] | None] = ContextVar(
    "check_ends", default=None
)


@contextmanager
def within_check_time(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Bound the time of a check: after `CHECK_S` no file is opened. An outer bound stays in
    force."""
    token = _check_ends.set(_check_ends.get() or (clock, clock() + CHECK_S))
    try:
        yield
    finally:
        _check_ends.reset(token)


@contextmanager
def opened(path: Path, remedy: str = REMEDY) -> Iterator[BinaryIO]:
    """Open a regular file, or a link to one, without waiting for a pipe or device.

    Raises:
      ModelError: it is missing or not a file, cannot be read, or the check has no time left.
    """
    ends = _check_ends.get()
    if ends is not None and ends[0]() > ends[1]:
        raise ModelError(
            f"{path} was not read: checking its directory takes more than {CHECK_S:g} s; copy "
            "the directory to a faster disk, or check whether its files belong to the model"
        )
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(f"{path} is not a regular file; {remedy}")
            yield file
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; {remedy}") from None
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror or error}; let this user read it, or {remedy}"
        ) from error


def read_bytes(path: Path, most: int | None = None, remedy: str = REMEDY) -> bytes:
    """Return the content of a file.

    Args:
      path: path of the file.
      most: largest size in bytes; None for the bound of its name.
      remedy: what to do if it cannot be used.

    Raises:
      ModelError: as in `opened`; or it is larger.
    """
    most = BOUNDS.get(path.name, DOCUMENT).num_bytes if most is None else most
    with opened(path, remedy) as file:
        content = file.read(min(os.fstat(file.fileno()).st_size, most) + 1)
    if len(content) > most:
        raise ModelError(f"{path} has more than {most} bytes, the most for such a file; {remedy}")
    return content


def read_text(path: Path, most: int | None = None) -> str:
    """Return a file's text of at most `most` bytes; see `read_bytes`.

    Raises:
      ModelError: as in `read_bytes`; or it is not UTF-8.
    """
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}; {REMEDY}") from error


def parse_json(where: object, content: bytes, most: int, remedy: str = REMEDY) -> object:
    """Parse the JSON of a file.

    Args:
      where: the file's path, or words that describe it.
      content: the JSON.
      most: limit on its number of values.
      remedy: what to do if it cannot be used.

    Raises:
      ModelError: it is not JSON, or has more values.
    """
    if sum(map(content.count, (b",", b"[", b"{"))) > most:
        raise ModelError(f"{where} has more than {most} values, the most for such a file; {remedy}")
    try:
        value: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON: {error}; {remedy}") from error
    return value


def read_json_value(path: Path) -> object:
    """Parse a JSON file; see `read_bytes` and `parse_json`."""
    return parse_json(path, read_bytes(path), BOUNDS.get(path.name, DOCUMENT).num_values)


def read_json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    """Return the object in a JSON file; empty for a missing optional file.

    Raises:
      ModelError: as in `read_json_value`; or it is not an object.
    """
    if is_optional and not path.exists():
        return {}
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds JSON that is not an object; {REMEDY}")
    return value


def count_of(path: Path, fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Return a number that sets a size, once it is known to be in its range.

    Args:
      path: path of the file.
      fields: parsed fields of the file.
      name: one of `RANGES`; in a GGUF file prefixed with the architecture.
      default: for a missing field.

    Raises:
      ModelError: it is not a whole number, or out of range.
    """
    value = default if fields.get(name) is None else fields[name]
    most = RANGES[name.partition(".")[2] if name not in RANGES else name]
    if type(value) is not int or not 1 <= value <= most:
        raise ModelError(f"{path}: {name} is {repr(value)[:80]}; allowed: 1 to {most}; {REMEDY}")
    return value


def end_token_ids(path: Path, fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a sequence; empty if the file names none.

    Raises:
      ModelError: the field holds something else.
    """
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    most = RANGES["eos_token_id"]
    if not all(type(one) is int and 0 <= one < most for one in ids):
        raise ModelError(
            f"{path}: eos_token_id is {repr(value)[:80]}; it must be a token id or a list, each "
            f"from 0 to {most - 1}; {REMEDY}"
        )
    return tuple(ids)

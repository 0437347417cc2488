"""JSON from strangers. Knows what of JSON is refused and why; knows no schema.

Refused beyond bad syntax: a byte order mark and other encodings than UTF-8, NaN, infinities and
numbers that overflow to them, duplicate keys (two readers would see two documents), lone surrogates
(they cannot be encoded again), depth that exhausts the parser, objects with very many keys (each
one that is unknown would make an error of its own) and very many values: the parser holds the
interpreter's lock, and 16 MiB of `[1],` are seconds in which no stream of anybody's gets on.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Final

from .errors import echo, http_error

if TYPE_CHECKING:
    from typing import Any

    from triolet.errors import RequestError

MAX_KEYS: Final = 1024
"""Three times the largest object that any endpoint takes."""
MAX_VALUES: Final = 1 << 20
"""In one body, about: more token ids than contexts hold, and 0.1 s of the parser."""
MAX_CONTAINERS: Final = 1 << 16
"""Arrays and objects in one body: each costs ten times what a number does."""
MAX_WHOLE: Final = 1 << 63
"""The largest integer of any field; beyond, a float with an integer's value stays a float."""
_BOM = b"\xef\xbb\xbf"


class _Refused(ValueError):
    """Valid JSON that is not accepted."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_KEYS:
        raise _Refused(f"an object has more than {MAX_KEYS} keys")
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {echo(key)} occurs twice in one object")
            seen.add(key)
    return value


def _number(text: str) -> float:
    """Return a number; as an integer where its value is one, as JSON Schema has it: 1.0 is 1."""
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {echo(text)} is too large")
    return int(value) if value.is_integer() and abs(value) <= MAX_WHOLE else value


def _constant(text: str) -> float:
    raise _Refused(f"{text} is not a number in JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_number, parse_constant=_constant
)


def _bad(reason: str) -> RequestError:
    return http_error(400, f"the body is not valid JSON: {reason}")


def parse_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a request's body.

    Raises:
      RequestError: 400, with the place of the fault.
    """
    if not body:
        raise http_error(400, "the body is empty; send a JSON object")
    if body.startswith(_BOM):
        raise _bad("it begins with a byte order mark; send UTF-8 without one")
    if holds_many_values(body):
        raise _bad(f"it holds more than {MAX_VALUES} values or {MAX_CONTAINERS} arrays and objects")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"byte {error.start} is not UTF-8") from None
    try:
        value = _DECODER.decode(text)
    except _Refused as error:
        raise _bad(str(error)) from None
    except RecursionError:
        raise _bad("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _bad(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError:
        # Only the conversion of an integer of more than 4300 digits ends here.
        raise _bad("an integer has too many digits") from None
    if not isinstance(value, dict):
        raise http_error(400, "the body is not a JSON object")
    if "\\ud" in text or "\\uD" in text:
        _refuse_lone_surrogates(value)
    return value


def holds_many_values(body: bytes) -> bool:
    """Count what lies between the strings, before anything is made of it."""
    if len(body) <= MAX_CONTAINERS or not _has_many(body):
        return False
    if body.count(b"\\\\") > MAX_VALUES or body.count(b'\\"') > MAX_VALUES:
        return True  # to look behind so many escapes would take as long
    # A quotation mark that is left then begins or ends a string.
    rest = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return rest.count(b'"') > 2 * MAX_VALUES or _has_many(b"".join(rest.split(b'"')[::2]))


def _has_many(body: bytes) -> bool:
    num_containers = body.count(b"[") + body.count(b"{")
    return num_containers > MAX_CONTAINERS or body.count(b",") > MAX_VALUES


def _refuse_lone_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad("a string holds half of a surrogate pair") from None

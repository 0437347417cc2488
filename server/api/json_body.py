"""Strict JSON of a request's body, and its fields.

JSON is refused beyond bad syntax for: a byte order mark, other encodings than UTF-8, NaN, numbers
that overflow to infinity, duplicate keys (two readers would see two documents), lone surrogates
(they cannot be encoded again), depth that exhausts the parser, objects with very many keys (each
unknown one would make an error of its own) and very many values: they become objects of Python's,
each of which costs the event loop something.

Large bodies are read in text processes, so nothing here knows of a request.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

from ..text.process import job
from ..text.tool_forms.scanning import MAX_CONTAINERS, MAX_VALUES, holds_many_values
from .errors import echo, http_error
from .schemas import StrictModel, read_request, take_unknown

if TYPE_CHECKING:
    from triolet.errors import RequestError

    from .schemas import ModelT


MAX_KEYS: Final = 1024
"""Three times the largest object that any endpoint takes."""
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


@job
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


def _refuse_lone_surrogates(value: dict[str, Any]) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise _bad("a string holds half of a surrogate pair") from None


def read_body_fields(
    kind: type[ModelT], body: bytes, is_strict: bool
) -> tuple[ModelT, tuple[str, ...]]:
    """Return the fields in a body, and the names of those that have no effect.

    Args:
      kind: what they are read with.
      body: as it came.
      is_strict: whether unknown names are refused.

    Raises:
      RequestError: 400.
    """
    named = parse_object(body)
    unknown = () if is_strict else take_unknown(kind, named)
    return read_request(kind, named), unknown


@job
def checked_fields(
    kind: str, body: bytes, is_strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what `read_request` makes fields of, having made them once: what is wrong with large
    bodies is found here.

    Args:
      kind: the name of what they are read with.
      body: as it came.
      is_strict: whether unknown names are refused.

    Raises:
      RequestError: 400.
    """
    named = parse_object(body)
    found = StrictModel.kinds[kind]
    unknown = () if is_strict else take_unknown(found, named)
    read_request(found, named)
    return named, unknown

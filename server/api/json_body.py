"""Strict JSON parsing of request bodies, and their validation into fields.

Beyond bad syntax, the parser refuses byte order marks, encodings other than UTF-8, NaN, numbers
that overflow, duplicate keys (readers would disagree), lone surrogates (they cannot be encoded),
nesting that exhausts the parser, objects with very many keys (each unknown one makes an error) and
very many values (each Python object costs event loop time).

Text processes parse large bodies, so this module does not use the current request.
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


MAX_KEYS: Final = 1024
"""Three times the number of fields of the largest request."""
MAX_WHOLE: Final = 1 << 63
"""The largest integer of any field. Floats with a larger whole value stay floats."""
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
    """Return a number, as an integer if its value is whole, as in JSON Schema: 1.0 is 1."""
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
    """Parse the JSON object in a request's body.

    Raises:
      RequestError: 400, with the position of the error.
    """
    if not body:
        raise http_error(400, "the body is empty; send a JSON object")
    if body.startswith(_BOM):
        raise _bad("it starts with a byte order mark; send UTF-8 without one")
    if holds_many_values(body):
        raise _bad(
            f"it contains more than {MAX_VALUES} values or {MAX_CONTAINERS} arrays and objects"
        )
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
        # Only the conversion of an integer of more than 4300 digits raises this.
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
        raise _bad("a string contains half of a surrogate pair") from None


def named_fields(
    kind: type[StrictModel], body: bytes, is_strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a body's fields for `read_request`, and the names of fields without effect.

    Args:
      kind: the request model.
      body: the raw body.
      is_strict: whether unknown names are refused.

    Raises:
      RequestError: 400.
    """
    named = parse_object(body)
    return named, () if is_strict else take_unknown(kind, named)


@job
def checked_fields(
    kind: str, body: bytes, is_strict: bool
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the same after validating the fields once, so that errors in large bodies are found in
    this process.

    Args:
      kind: name of the request model.
      body: the raw body.
      is_strict: whether unknown names are refused.

    Raises:
      RequestError: 400.
    """
    found = StrictModel.kinds[kind]
    named, unknown = named_fields(found, body, is_strict)
    read_request(found, named)
    return named, unknown

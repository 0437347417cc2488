"""What every model of a request's fields stands on: nothing is converted, and what is wrong with a
value is said in words of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

WORDS: Final = {
    "string_type": "be a string",
    "string_unicode": "be a string of Unicode characters",
    "string_too_short": "have {min_length} or more characters",
    "string_too_long": "have no more than {max_length} characters",
    "string_pattern_mismatch": "match {pattern}",
    "int_type": "be an integer",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "bool_type": "be true or false",
    "literal_error": "be {expected}",
    "list_type": "be a list",
    "tuple_type": "be a list",
    "too_short": "have {min_length} or more entries",
    "too_long": "have no more than {max_length} entries",
    "dict_type": "be an object",
    "model_type": "be an object",
    "dataclass_exact_type": "be a string or a list of blocks",
}
"""What a value must do, by the library's word for what is wrong with it."""
_OF_VALIDATORS: Final = ("value_error", "unsupported")
_OF_FIELDS: Final = ("missing", *_OF_VALIDATORS)
"""Errors of a field, which the body may lack."""
OTHERWISE: Final = "be as /openapi.json describes it"


class StrictFields(BaseModel):
    """Nothing is converted: "1" is no number and true is no integer."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class Fault(NamedTuple):
    """What is wrong with a request.

    Attributes:
      kind: the library's word for it.
      param: where, as the client wrote it.
      message: the words of a validator of ours, or what the value must do.
      value: that is wrong.
    """

    kind: str
    param: str
    message: str
    value: object


class _Place(NamedTuple):
    """A place in a body.

    Attributes:
      path: names and indices that the body has.
      num_before: parts of the library's path before the first that names no value but one of
        several forms that a value may have; all of them where there is none.
    """

    path: tuple[str | int, ...]
    num_before: int


def first_fault(error: ValidationError, body: Mapping[str, Any]) -> Fault:
    """Return what is wrong first. Of a value that fits none of its forms that is what is wrong with
    the form that fits it furthest, or all that it might be."""
    details = error.errors(include_url=False)
    first = details[0]
    place = _place(first, body)
    if place.num_before == len(first["loc"]):
        return _fault(place, [first])
    prefix = first["loc"][: place.num_before]
    forms = [one for one in details if one["loc"][: len(prefix)] == prefix]
    places = [_place(one, body) for one in forms]
    deepest = max(places, key=lambda one: len(one.path))
    if len(deepest.path) > len(prefix):
        return _fault(deepest, [forms[places.index(deepest)]])
    return _fault(deepest, forms)


def _fault(place: _Place, details: Sequence[ErrorDetails]) -> Fault:
    first = details[0]
    kind = first["type"]
    words = dict.fromkeys(
        WORDS.get(one["type"], OTHERWISE).format_map(one.get("ctx", {})) for one in details
    )
    message = "must " + " or ".join(words)
    if kind in _OF_VALIDATORS:
        message = first["msg"].removeprefix("Value error, ")
    return Fault(kind, ".".join(map(str, place.path)), message, first["input"])


def _place(detail: ErrorDetails, body: Mapping[str, Any]) -> _Place:
    value: Any = body
    path: list[str | int] = []
    loc = detail["loc"]
    num_before = len(loc)
    for number, part in enumerate(loc):
        is_field = detail["type"] in _OF_FIELDS and number == len(loc) - 1
        has_part = part in value if isinstance(value, dict) else _has_index(value, part)
        if has_part:
            value = value[part]
        if has_part or is_field:
            path.append(part)
        else:
            num_before = min(num_before, number)
    return _Place(tuple(path), num_before)


def _has_index(value: object, part: str | int) -> bool:
    return isinstance(value, list) and isinstance(part, int) and part < len(value)

"""Values that a model writes bare or as Python literals, as JSON of the types in a schema."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import TYPE_CHECKING, Any, Final

from .scanning import no_constant, written
from .tool_calls import CallSchema, UnenforceableSchemaError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_NAMES: Final = {"true": True, "false": False, "null": None}
"""JSON's names, which models write into Python."""
_UNLIMITED: Final[frozenset[str]] = frozenset()
MAX_LITERAL_CHARS: Final = 16 * 1024
"""Of a literal that is no string. A model may write anything there, and the parser takes up to 3 s
for a megabyte of operators."""
_STRING: Final = re.compile(
    r"""('{3}|"{3})(?:(?!\1)[^\\]|\\.)*\1|(['"])(?:(?!\2)[^\\]|\\.)*\2""", re.DOTALL
)
MAX_SHOWN: Final = 64
"""Characters of a property's name that an error repeats."""
MAX_DEPTH: Final = 4
"""Choices within choices that types are looked for in: a schema may refer to itself."""


def python_json(source: str) -> str | None:
    """Return a Python literal as JSON; None if the source is no literal that JSON can hold."""
    source = source.strip()
    if len(source) > MAX_LITERAL_CHARS and not _STRING.fullmatch(source):
        return None
    try:
        with warnings.catch_warnings():
            # Of unknown escapes in strings, which stand for themselves.
            warnings.simplefilter("ignore")
            tree = ast.parse(source, mode="eval")
        return written(_plain(tree.body))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _plain(node: ast.expr) -> object:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_plain(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else _plain(key) for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_plain, values), strict=True))
    raise ValueError("no literal")


def bare_json(text: str, schema: Mapping[str, Any] | None, root: Mapping[str, Any]) -> str:
    """Return a value that stands without quotes as JSON.

    Args:
      text: the value.
      schema: of the value; None where nothing is known of it.
      root: the schema that its references are looked up in.
    """
    types = types_of(schema, root)
    word = text.strip()
    if "null" in types and word in ("null", "None"):
        return "null"
    if types and types <= {"string", "null"}:
        return written(text)
    if is_json(word):
        return word
    found = python_json(word)
    # A name in quotes is a string that a model has put into quotes of its own accord.
    return written(text) if found is None else found


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def types_of(
    schema: Mapping[str, Any] | None, root: Mapping[str, Any], depth: int = MAX_DEPTH
) -> frozenset[str]:
    """Return the JSON types that a schema names, `depth` choices deep; none if it names none."""
    schema = resolved(schema, root)
    if schema is None or not depth:
        return _UNLIMITED
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
        return frozenset(("string",))
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        if isinstance(options, list) and options:
            each = [types_of(option, root, depth - 1) for option in options]
            return frozenset().union(*each) if all(each) else _UNLIMITED
    return _UNLIMITED


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a schema, or the one in `$defs` or `definitions` that it refers to."""
    if not isinstance(schema, dict):
        return None
    reference = schema.get("$ref")
    if not isinstance(reference, str):
        return schema
    kind, _, name = reference.removeprefix("#/").partition("/")
    found = root.get(kind) if kind in ("$defs", "definitions") else None
    target = found.get(name) if isinstance(found, dict) else None
    # One step: what refers to something that refers again says nothing of its type.
    return target if isinstance(target, dict) and "$ref" not in target else None


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of an object's properties; none where they are not listed."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def writable_properties(
    tool: CallSchema, schema: Mapping[str, Any], names: re.Pattern[str]
) -> dict[str, Any]:
    """Return the schemas of the properties that a form of calls can name, without optional ones
    that it cannot; a property that is required and not listed may be anything.

    Args:
      tool: with these arguments.
      schema: of its arguments.
      names: matches a name that the form can write and its reader finds.

    Raises:
      UnenforceableSchemaError: the form cannot name a property that is required, or any of a
        strict tool's.
    """
    required = [name for name in required_of(schema) if isinstance(name, str)]
    properties = {**properties_of(schema)}
    for name in required:
        properties.setdefault(name, {})
    unwritable = [name for name in properties if not names.fullmatch(name)]
    for name in unwritable:
        if tool.is_strict or name in required:
            shown = name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}…"
            raise UnenforceableSchemaError(
                f"{tool.name} has the property {json.dumps(shown)}, a name that no call can hold"
            )
        del properties[name]
    return properties


def takes_any(schema: Mapping[str, Any]) -> bool:
    """Return whether an object lists no properties and may have any."""
    return not properties_of(schema) and schema.get("additionalProperties", True) is not False


def required_of(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the names of the properties that an object has to have."""
    required = schema.get("required")
    return required if isinstance(required, list) else ()


def definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a part of a schema may refer to."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}

"""Converts unquoted values and Python literals in tool calls to JSON, using types from a schema."""

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
"""JSON's constants, which models write into Python code."""
_UNLIMITED: Final[frozenset[str]] = frozenset()
MAX_LITERAL_CHARS: Final = 16 * 1024
"""Maximum length of a literal that is not a string. A model may write anything, and Python's parser
takes up to 3 s for a megabyte of operators."""
_STRING: Final = re.compile(
    r"""('{3}|"{3})(?:(?!\1)[^\\]|\\.)*\1|(['"])(?:(?!\2)[^\\]|\\.)*\2""", re.DOTALL
)
MAX_SHOWN: Final = 64
"""Maximum characters of a property's name that an error repeats."""
MAX_DEPTH: Final = 4
"""Maximum nesting of choices in which types are searched, since a schema may refer to itself."""


def python_json(source: str) -> str | None:
    """Return a Python literal as JSON; None if it is not a literal that JSON can represent."""
    source = source.strip()
    if len(source) > MAX_LITERAL_CHARS and not _STRING.fullmatch(source):
        return None
    try:
        with warnings.catch_warnings():
            # Unknown escapes in strings are taken literally.
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
    raise ValueError("not a literal")


def bare_json(text: str, schema: Mapping[str, Any] | None, root: Mapping[str, Any]) -> str:
    """Return an unquoted value as JSON.

    Args:
      text: the value.
      schema: its schema; None if unknown.
      root: the schema in which references are looked up.
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
    # A quoted name is a string that the model quoted without being asked to.
    return written(text) if found is None else found


def is_json(text: str) -> bool:
    """Whether a text is valid JSON."""
    try:
        json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def types_of(
    schema: Mapping[str, Any] | None, root: Mapping[str, Any], depth: int = MAX_DEPTH
) -> frozenset[str]:
    """Return the JSON types that a schema names, up to `depth` nested choices; empty if none."""
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
    # Only one step: the type of a chain of references is treated as unknown.
    return target if isinstance(target, dict) and "$ref" not in target else None


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of an object's properties; empty if none are listed."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def writable_properties(
    tool: CallSchema, schema: Mapping[str, Any], names: re.Pattern[str]
) -> dict[str, Any]:
    """Return the schemas of the properties that a format can write, dropping optional ones that it
    cannot. A required property that is not listed may have any value.

    Args:
      tool: the tool.
      schema: the schema of its arguments.
      names: matches names that the format can write and its reader can parse.

    Raises:
      UnenforceableSchemaError: the format cannot write a required property, or any property of a
        strict tool.
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
                f"{tool.name} has the property {json.dumps(shown)}, which no call can name"
            )
        del properties[name]
    return properties


def takes_any(schema: Mapping[str, Any]) -> bool:
    """Return whether an object lists no properties and allows any."""
    return not properties_of(schema) and schema.get("additionalProperties", True) is not False


def required_of(schema: Mapping[str, Any]) -> Sequence[Any]:
    """Return the names of an object's required properties."""
    required = schema.get("required")
    return required if isinstance(required, list) else ()


def definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definitions that a part of a schema may refer to."""
    return {key: root[key] for key in ("$defs", "definitions") if key in root}

"""Converts settings from text, TOML and JSON to config objects with `msgspec.convert`, and its
errors to messages that name the field, the value and the allowed values. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeVar, get_args, get_origin

import msgspec
from msgspec import inspect

from triolet.config import FleetModelConfig
from triolet.errors import ConfigError
from triolet.units import parse_size

from .form import (
    MODELS,
    REDIS_URLS,
    Settings,
    dotted,
    is_section,
    nested,
    shown,
    types_of,
    unknown,
    without_none,
)

if TYPE_CHECKING:
    from .form import Kind, Path, Value

T = TypeVar("T")
NOTHING: Final = frozenset({"auto", "none"})
"""Words that stand for no value, because TOML has no null."""
GIVE_REF: Final = "give its ref: a directory, a GGUF file, demo, or a version such as chat@stable"
_SIZE: Final = "_bytes"
_OF_NAMED: Final = {"model": "its name: NAME=MODEL", "adapters": f"{MODELS}.NAME.adapters"}
_PLACE: Final = re.compile(r" - at `\$(.*)`$")
_STEP: Final = re.compile(r"\w+")
_WORDS: Final[dict[type[inspect.Type], str]] = {
    inspect.BoolType: "true or false",
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.StrType: "text",
    inspect.VarTupleType: "a list",
    inspect.DictType: "a table of names, or NAME=VALUE,NAME=VALUE",
}


class Misfit(ConfigError):
    """A config type refused its values.

    Attributes:
      path: path of the invalid value, part of a value, or object.
      said: the message without the path.
      section: path of the object that refused it.
      given: paths of the invalid values; empty if `said` names them.
    """

    def __init__(
        self, path: Path, said: str, section: Path | None = None, given: tuple[Path, ...] = ()
    ) -> None:
        super().__init__(f"{dotted(path)}{said}")
        self.path = path
        self.said = said
        self.section = path if section is None else section
        self.given = given


def as_value(kind: Kind, value: object, path: Path) -> Value:
    """Convert a value for msgspec: sizes to bytes, and words in NOTHING to None.

    Raises:
      ConfigError: a size is invalid, or a table has an unknown name.
    """
    inner = without_none(kind)
    if isinstance(value, dict) and is_section(inner):
        known = types_of(inner)
        for name in sorted(value.keys() - known.keys()):
            raise unknown((*path, name), len(path), known)
        return {name: as_value(known[name], one, (*path, name)) for name, one in value.items()}
    origin: object = get_origin(inner)
    if isinstance(value, list) and origin is tuple:
        each = get_args(inner)[0]
        return [as_value(each, one, (*path, str(at))) for at, one in enumerate(value)]
    if not isinstance(value, str):
        return value
    nothing = NOTHING if inner is not str else NOTHING - {"auto"}
    if NoneType in get_args(kind) and value in nothing:
        return None
    if inner is int and path[-1].endswith(_SIZE):
        try:
            return parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"{dotted(path)}: {error}") from None
    return value


def from_text(kind: Kind, text: str, path: Path) -> Value:
    """Return the value of an argument: parsed as JSON, or the text itself.

    Raises:
      ConfigError: the path is that of a section.
    """
    if is_section(kind):
        raise ConfigError(
            f"{dotted(path)} is a section; set one of its fields: {', '.join(types_of(kind))}"
        )
    inner = without_none(kind)
    origin: object = get_origin(inner)
    if origin is tuple and not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if origin is Mapping and not text.startswith("{"):
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        is_whole = all(is_given for _, is_given, _ in pairs)
        return {name.strip(): one.strip() for name, _, one in pairs} if is_whole else text
    is_size = inner is int and path[-1].endswith(_SIZE)
    if is_size or (isinstance(inner, type) and issubclass(inner, str)):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def build(values: Mapping[Path, Any]) -> Settings:
    """Return the settings with values in place of defaults.

    Args:
      values: values by the paths of the objects' fields.

    Raises:
      Misfit: a value or a combination is invalid.
    """
    tables = nested(values)
    of_models = tables.pop(MODELS, {})
    settings = converted(tables, Settings)
    # Keep the order in which the models were named, whatever fields were set first.
    names = sorted(of_models, key=lambda name: "ref" not in of_models[name])
    models = {name: converted(of_models[name], FleetModelConfig, (MODELS, name)) for name in names}
    settings = replace(settings, models=models)
    _require_models(settings, values)
    return settings


def converted(value: Value, kind: type[T], at: Path = ()) -> T:
    """Return an object of a config type, or a value of one of its fields.

    Args:
      value: the value; for an object, a table of its fields.
      kind: the type.
      at: path of the object.

    Raises:
      Misfit: a value is invalid.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _misfit(error, value, kind, at) from None


def _misfit(error: msgspec.ValidationError, table: object, kind: type[Any], at: Path) -> Misfit:
    """Convert an error of msgspec to one that names the invalid value and the allowed ones."""
    place = _PLACE.search(str(error))
    steps = _STEP.findall(place[1]) if place else []
    value: Any = table
    allowed = inspect.type_info(kind)
    for step in steps:
        match _present(allowed):
            case inspect.VarTupleType(item_type=allowed):
                value = value[int(step)]
            case inspect.TupleType(item_types=kinds):
                value, allowed = value[int(step)], kinds[int(step)]
            case inspect.DataclassType(fields=fields):
                value = value[step]
                allowed = next(one.type for one in fields if one.name == step)
    path = (*at, *steps)
    if error.__cause__ is not None:  # a config type's own error about its fields
        name, _, rest = str(error.__cause__).partition(" ")
        is_field = any(one.name == name for one in getattr(_present(allowed), "fields", ()))
        if is_field:
            return Misfit((*path, name), f" {rest}", path)
        return Misfit(path, f": {error.__cause__}", path)
    told = "not a value of its kind" if path[-2:] in REDIS_URLS else shown(value)
    return Misfit(path, f" is {told}; allowed: {_allowed(_present(allowed), value, path[-1])}")


def _present(kind: inspect.Type) -> inspect.Type:
    """Return a type without None."""
    if not isinstance(kind, inspect.UnionType):
        return kind
    return next(one for one in kind.types if not isinstance(one, inspect.NoneType))


def _allowed(kind: inspect.Type, value: object, name: str) -> str:
    """Describe the allowed values of a type; only the bounds if a number exceeds them."""
    match kind:
        case inspect.EnumType(cls=cls):
            return ", ".join(str(one.value) for one in cls)
        case inspect.LiteralType(values=values):
            return ", ".join(map(str, values))
        case inspect.TupleType(item_types=kinds):
            return f"a list of {len(kinds)}"
        case inspect.DataclassType(fields=fields):
            needed = [one.name for one in fields if one.required]
            with_needed = f" that has {', '.join(needed)}, and" if needed else ""
            return f"a table{with_needed} of {', '.join(one.name for one in fields)}"
        case inspect.IntType() | inspect.FloatType():
            bounds = _bounds(kind)
            is_number = type(value) is int or (
                type(value) is float and isinstance(kind, inspect.FloatType)
            )
            if is_number and bounds:
                return bounds
            is_size = isinstance(kind, inspect.IntType) and name.endswith(_SIZE)
            words = "a size such as 512MiB" if is_size else _WORDS[type(kind)]
            return f"{words}, {bounds}" if bounds else words
    return _WORDS[type(kind)]


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f"{kind.ge} to {kind.le}"
    bounds = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
    return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)


def _require_models(settings: Settings, values: Mapping[Path, Any]) -> None:
    """Check the settings of several models: each has a ref and unique names.

    Raises:
      Misfit: a setting is missing or in conflict.
    """
    taken: dict[str, Path] = {name: (MODELS, name, "ref") for name in settings.models}
    for name, model in settings.models.items():
        own: Path = (MODELS, name)
        if not model.ref:
            raise Misfit((*own, "ref"), f" is missing; {GIVE_REF}", own)
        for alias in model.aliases:
            path: Path = (*own, "aliases")
            other = taken.setdefault(alias, path)
            if other != path:
                said = f" has {alias!r}, which is already a name of {dotted(other[:2])}; choose "
                raise Misfit(path, f"{said}another alias", own, (path, other))
    of_one: tuple[Path, ...] = (
        ("fleet", "model"),
        ("fleet", "adapters"),
        ("server", "model_name"),
        ("server", "model_aliases"),
    )
    for path in of_one if settings.models else ():
        if values.get(path):
            names = ", ".join(settings.models)
            remedy = _OF_NAMED.get(path[-1], f"{MODELS}.NAME.aliases")
            said = f" is {shown(values[path])}, but the fleet has named models ({names}); "
            given = (path, *taken.values())
            raise Misfit(path, f"{said}remove it, or give {remedy}", path, given)

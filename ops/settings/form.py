"""The form of the settings: sections of dataclasses, typed paths into them, values read strictly.

A path is a tuple of names such as `("server", "queue", "fair")`. Pure.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from dataclasses import fields as fields_of
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec

from triolet.config import (
    AUTO,
    AutoConfig,
    ControlConfig,
    FleetConfig,
    LinkConfig,
    ModelConfig,
    ProcessConfig,
    ServerConfig,
    StoreConfig,
    SupervisorConfig,
    WorkerConfig,
)
from triolet.config.auto import GIVE_LADDER
from triolet.errors import ConfigError
from triolet.ids import Role
from triolet.units import parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

Path: TypeAlias = tuple[str, ...]
Kind: TypeAlias = Any
"""A type, or a form of typing such as a union."""
Value: TypeAlias = Any
"""Of a field of any type."""

SECTIONS: Final[dict[str, type[Any]]] = {
    "fleet": FleetConfig,
    "server": ServerConfig,
    "worker": WorkerConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    "link": LinkConfig,
    "process": ProcessConfig,
    "supervisor": SupervisorConfig,
    "control": ControlConfig,
    "store": StoreConfig,
    "auto": AutoConfig,
}
"""`worker` holds for both kinds of worker, `link` for every process."""
MODELS: Final = "models"
"""The section of several models, with a section for each by its name."""
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Part of the names of its workers in logs and metrics, and of paths of URLs, as it is."""
_WHOLE_BLOCKS: Final = "KV leaves in whole blocks after each step; remove the setting"
GONE: Final[dict[Path, str]] = {
    ("link", "wire", "layer_groups"): _WHOLE_BLOCKS,
    ("link", "wire", "layer_group_min_tokens"): _WHOLE_BLOCKS,
    ("worker", "engine", "kv_wire"): "KV travels in the type it is computed in; remove the setting",
}
"""Fields that there were, and what holds instead."""
ELSEWHERE: Final = {
    "link": "section [link]",
    "auto": "section [auto]",
    "model_dir": "fleet.model",
}
"""Fields of server and workers that are set once for all of them, and where."""
SPREAD: Final[dict[str, tuple[Path, ...]]] = {
    "worker": (("prefill",), ("decode",)),
    "link": (("server", "link"), ("prefill", "link"), ("decode", "link")),
    "auto": (("server", "auto"),),
}
"""Sections that hold for several objects."""
ONE_ROLE: Final[dict[Path, Role]] = {
    ("kv_address",): Role.DECODE,
    ("advertised_kv_address",): Role.DECODE,
    ("speculation",): Role.DECODE,
    ("engine", "prompt_chunk_tokens"): Role.DECODE,
    ("engine", "embedding"): Role.PREFILL,
    ("max_waiting_tokens",): Role.PREFILL,
}
"""Fields and sections of a worker that one kind alone reads. `worker` sets them for this kind."""
NOTHING: Final = frozenset({"auto", "none"})
"""Words for the absence of a value, which TOML has no other word for."""
_SIZE: Final = "_bytes"
_GIVE_REF: Final = "give its ref: a directory, a GGUF file, demo, or a version such as chat@stable"
_OF_NAMED: Final = {"model": "its name: NAME=MODEL", "adapters": f"{MODELS}.NAME.adapters"}
STDIN: Final = "-"
"""In place of a path: settings come from standard input."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that the processes of a fleet are configured with."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    prefill: WorkerConfig = field(default_factory=WorkerConfig)
    decode: WorkerConfig = field(default_factory=WorkerConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    """By name, where there are several or the only one has a name; else it is `fleet.model`."""

    def worker(self, role: Role) -> WorkerConfig:
        """Return the settings of a kind of worker."""
        return self.prefill if role is Role.PREFILL else self.decode


@cache
def types_of(kind: Kind) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields_of(kind)}


def is_section(kind: object) -> bool:
    """Return whether a type is a dataclass, whose fields are set one by one."""
    return isinstance(kind, type) and is_dataclass(kind)


@cache
def leaves() -> dict[Path, Any]:
    """Return every settable path with the type of its value, in the order of the sections."""
    return {
        path: kind
        for name, one in SECTIONS.items()
        for path, kind in _leaves(one, (name,))
        if spread(path)
    }


def reader(path: Path) -> Role | None:
    """Return the only kind of worker that reads a field of workers, or None."""
    if path[0] not in ("worker", *SPREAD["worker"][0], *SPREAD["worker"][1]):
        return None
    return next((role for own, role in ONE_ROLE.items() if path[1 : len(own) + 1] == own), None)


def _leaves(kind: Kind, prefix: Path) -> Iterator[tuple[Path, Any]]:
    for name, inner in types_of(kind).items():
        if len(prefix) == 1 and name in ELSEWHERE:
            continue
        if is_section(inner):
            yield from _leaves(inner, (*prefix, name))
        else:
            yield (*prefix, name), inner


def dotted(path: Path) -> str:
    """Return a path as it is written."""
    return ".".join(path)


def find(path: Path) -> Kind:
    """Return the type of the value at a path; a dataclass for a section.

    Raises:
      ConfigError: there is none; the text names the nearest.
    """
    if path in GONE:
        raise ConfigError(f"{dotted(path)} is no setting any more: {GONE[path]}")
    if path[0] == MODELS:
        return _find_of_model(path)
    kind: Any = None
    for depth, name in enumerate(path):
        known: Mapping[str, Any] = SECTIONS if depth == 0 else types_of(kind)
        if depth == 1:
            known = {one: inner for one, inner in known.items() if one not in ELSEWHERE}
        if name not in known:
            raise ConfigError(
                f"{dotted(path[: depth + 1])} is unknown; {_advice(path, depth, known)}"
            )
        kind = known[name]
        if depth and (role := reader(path[: depth + 1])) and path[0] not in ("worker", role.value):
            raise ConfigError(
                f"{dotted(path[: depth + 1])} has no effect: {path[0]} workers do not read it; "
                f"use {dotted((role.value, *path[1:]))}"
            )
        if depth + 1 < len(path) and not is_section(kind):
            raise ConfigError(f"{dotted(path[: depth + 1])} is a value and has no fields")
    return kind


def _find_of_model(path: Path) -> Kind:
    if len(path) == 1:
        return Mapping
    try:
        require_model_name(path[1])
    except ConfigError as error:
        raise ConfigError(f"{MODELS}: {error}") from None
    if len(path) == 2:
        return ModelConfig
    known = types_of(ModelConfig)
    if path[2] not in known:
        near = difflib.get_close_matches(path[2], known, 1)
        advice = f"allowed: {', '.join(known)}"
        if near:
            advice = f"did you mean {dotted((*path[:2], near[0]))}?"
        raise ConfigError(f"{dotted(path)} is unknown; {advice}")
    if len(path) > 3:
        raise ConfigError(f"{dotted(path[:3])} is a value and has no fields")
    return known[path[2]]


def require_model_name(name: str) -> None:
    """Look whether a model of a fleet may have a name.

    Raises:
      ConfigError: it may not.
    """
    if not _MODEL_NAME.fullmatch(name):
        raise ConfigError(
            f"{_shown(name)} is no name of a model; allowed: 1 to 63 of the characters a-z, A-Z, "
            "0-9, '.', '_' and '-', a letter or digit first and last. Other names that clients "
            f"use may be its aliases ({MODELS}.NAME.aliases)"
        )


def path_of(text: str) -> Path:
    """Return the path that is written as text. A model's name may have dots in it."""
    text = text.strip()
    section, _, rest = text.partition(".")
    if section != MODELS:
        return tuple(text.split("."))
    name, _, last = rest.rpartition(".")
    return (section, *([name] if name else []), *([last] if last else []))


def _advice(path: Path, depth: int, known: Mapping[str, Any]) -> str:
    name = path[depth]
    if depth == 1 and name in ELSEWHERE:
        return f"it is set by {ELSEWHERE[name]}"
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"did you mean {dotted((*path[:depth], near[0]))}?"
    last = {one[-1]: dotted(one) for one in reversed(leaves())}
    elsewhere = last.get(path[-1]) or last.get(
        next(iter(difflib.get_close_matches(path[-1], last, 1)), "")
    )
    if elsewhere is not None:
        return f"did you mean {elsewhere}?"
    return f"allowed: {', '.join(known)}"


def flatten(table: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield path and value of everything that a document of sections holds, read by their types.

    Raises:
      ConfigError: a field is unknown, or a value is not of its type.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{dotted(path) or 'the document'} is {_shown(table)}; allowed: a table")
    for name, value in table.items():
        inner = (*path, str(name))
        kind = find(inner)
        if path == (MODELS,) and value == {}:
            raise ConfigError(f"{dotted(inner)} says nothing; {_GIVE_REF}")
        if inner == (AUTO,) and value == {}:
            raise ConfigError(f"{AUTO} says nothing; {GIVE_LADDER}")
        if is_section(kind) or inner == (MODELS,):
            yield from flatten(value, inner)
        else:
            yield inner, read(kind, value, inner)


def read(kind: Kind, value: object, path: Path) -> Value:
    """Return a value of a field, as JSON, TOML or a person writes it.

    Raises:
      ConfigError: it is not of the field's type.
    """
    origin: object = get_origin(kind)
    arguments = get_args(kind)
    if origin in (Union, UnionType):
        inner = next(one for one in arguments if one is not NoneType)
        words = NOTHING if inner is not str else NOTHING - {"auto"}
        return (
            None
            if value is None or (isinstance(value, str) and value in words)
            else read(inner, value, path)
        )
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _wrong(path, value, "a table of names, or NAME=VALUE,NAME=VALUE")
        _, inner = arguments
        return {str(name): read(inner, one, (*path, str(name))) for name, one in value.items()}
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(path, value, "a list")
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) != len(value):
            raise _wrong(path, value, f"a list of {len(kinds)}")
        return tuple(read(one, item, path) for one, item in zip(kinds, value, strict=True))
    if is_section(kind):
        if not isinstance(value, dict) or set(value) - set(types_of(kind)):
            raise _wrong(path, value, f"a table of {', '.join(types_of(kind))}")
        known = types_of(kind)
        given = {name: read(known[name], one, (*path, name)) for name, one in value.items()}
        missing = [
            one.name
            for one in fields_of(kind)
            if one.default is one.default_factory is MISSING and one.name not in given
        ]
        if missing:
            raise _wrong(path, value, f"a table that has {', '.join(missing)} too")
        try:
            return kind(**given)
        except ConfigError as error:
            raise ConfigError(f"{dotted(path)}: {error}") from None
    return _scalar(kind, value, path)


def _scalar(kind: Kind, value: object, path: Path) -> Value:
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, str) and path[-1].endswith(_SIZE):
        try:
            return parse_size(value)
        except ConfigError as error:
            raise ConfigError(f"{dotted(path)}: {error}") from None
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
        raise _wrong(path, value, "a finite number")
    if kind is str and isinstance(value, str):
        return value
    if issubclass(kind, StrEnum) and value in list(kind):
        return kind(value)
    raise _wrong(path, value, _allowed(kind, path))


def from_text(kind: Kind, text: str, path: Path) -> Value:
    """Return the value of a field that is written as text, as in an argument.

    Raises:
      ConfigError: it is not of the field's type.
    """
    if is_section(kind):
        raise ConfigError(
            f"{dotted(path)} is a section; set one of its fields: {', '.join(types_of(kind))}"
        )
    return read(kind, _parsed(kind, text, path), path)


def _parsed(kind: Kind, text: str, path: Path) -> object:
    origin: object = get_origin(kind)
    arguments = get_args(kind)
    if origin in (Union, UnionType):
        inner = next(one for one in arguments if one is not NoneType)
        return text if text in NOTHING else _parsed(inner, text, path)
    if origin is tuple and not text.startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if origin is Mapping and not text.startswith("{"):
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        whole = all(is_given for _, is_given, _ in pairs)
        return {name.strip(): one.strip() for name, _, one in pairs} if whole else text
    is_plain = kind is str or (isinstance(kind, type) and issubclass(kind, StrEnum))
    if is_plain or (kind is int and path[-1].endswith(_SIZE)):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _allowed(kind: Kind, path: Path) -> str:
    if kind is bool:
        return "true or false"
    if kind is int:
        return "a size such as 512MiB" if path[-1].endswith(_SIZE) else "a whole number"
    if kind is float:
        return "a number"
    return "text" if kind is str else ", ".join(kind)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def _wrong(path: Path, value: object, allowed: str) -> ConfigError:
    shown = "not a value of its kind" if path[-1] == "limits" else _shown(value)
    return ConfigError(f"{dotted(path)} is {shown}; allowed: {allowed}")


def build(values: Mapping[Path, Any]) -> Settings:
    """Return the settings with values in place of defaults.

    Args:
      values: by path; those of `worker` and `link` are spread already.

    Raises:
      ConfigError: they cannot be together.
    """
    sections = {
        name: _built(kind, (name,), values)
        for name, kind in types_of(Settings).items()
        if is_section(kind)
    }
    # In the order in which they were named, whatever else was set before.
    of_models = sorted(
        (path for path in values if path[0] == MODELS), key=lambda one: one[2] != "ref"
    )
    names = dict.fromkeys(path[1] for path in of_models)
    models = {name: _built(ModelConfig, (MODELS, name), values) for name in names}
    settings = Settings(**sections, models=models)
    _require_models(settings, values)
    return settings


def _require_models(settings: Settings, values: Mapping[Path, Any]) -> None:
    """Look whether several models can be together.

    Raises:
      Misfit: they cannot.
    """
    taken: dict[str, Path] = {name: (MODELS, name, "ref") for name in settings.models}
    for name, model in settings.models.items():
        own: Path = (MODELS, name, "ref")
        if not model.ref:
            given = tuple(path for path in values if path[:2] == own[:2])
            raise Misfit(f"{dotted(own)} is missing; {_GIVE_REF}", given)
        for alias in model.aliases:
            path: Path = (MODELS, name, "aliases")
            other = taken.setdefault(alias, path)
            if other != path:
                raise Misfit(
                    f"{dotted(path)} has {alias!r}, which is a name of {dotted(other[:2])}; each "
                    "name is of one model",
                    (path, other),
                )
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
            raise Misfit(
                f"{dotted(path)} is {_shown(values[path])}, beside models with names of their own "
                f"({names}); remove it, or give {remedy}",
                (path, *taken.values()),
            )


def _built(kind: Kind, path: Path, values: Mapping[Path, Any]) -> Value:
    given: dict[str, Any] = {}
    for name, inner in types_of(kind).items():
        where = (*path, name)
        if is_section(inner):
            if any(one[: len(where)] == where for one in values):
                given[name] = _built(inner, where, values)
        elif where in values:
            given[name] = values[where]
    try:
        return kind(**given)
    except ConfigError as error:
        message = str(error)
        is_of_field = message.partition(" ")[0] in types_of(kind)
        named = tuple((*path, name) for name in given if name in message)
        shown = dotted(_section_of(path))
        raise Misfit(f"{shown}{'.' if is_of_field else ': '}{message}", named) from None


def _section_of(path: Path) -> Path:
    """Return the section that an operator sets an object by, if that stands for this one alone."""
    sections = ((name,) for name, targets in SPREAD.items() if targets == (path,))
    return next(sections, path)


class Misfit(ConfigError):
    """A dataclass refused its values.

    Attributes:
      given: paths of the values that the message names.
    """

    def __init__(self, message: str, given: tuple[Path, ...]) -> None:
        super().__init__(message)
        self.given = given


def spread(path: Path) -> list[Path]:
    """Return the paths of the objects' own fields that a path of a section stands for; none of a
    field that the role does not read."""
    role = reader(path)
    return [
        (*target, *path[1:])
        for target in SPREAD.get(path[0], ((path[0],),))
        if role is None or target == (role.value,)
    ]


def show(value: Value) -> str:
    """Return a value of a field as an operator writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(show, value)) or "[]"
    if isinstance(value, Mapping):
        return ",".join(f"{name}={show(one)}" for name, one in value.items()) or "none"
    if is_dataclass(value):
        return msgspec.json.encode(value).decode()
    return f"{value:g}" if isinstance(value, float) else str(value)


def value_at(settings: Settings, path: Path) -> Value:
    """Return the value of a field."""
    if path[0] == MODELS:
        return getattr(settings.models[path[1]], path[2])
    value: Any = settings
    for name in spread(path)[0]:
        value = getattr(value, name)
    return value


def document(settings: Settings, role: Role) -> bytes:
    """Return the settings of one process as one line of JSON, which `--config -` reads."""
    if role is Role.CONTROL:
        return (
            msgspec.json.encode({"control": settings.control, "process": settings.process}) + b"\n"
        )
    own = settings.server if role is Role.SERVER else settings.worker(role)
    sections: dict[str, Any] = {
        "fleet": {"model": settings.fleet.model},
        role.value: own,
        "link": own.link,
        "process": settings.process,
    }
    if role is Role.SERVER:
        sections["auto"] = settings.server.auto
    plain = msgspec.to_builtins(sections)
    for name in ELSEWHERE:
        plain[role.value].pop(name, None)
    for path, reading in ONE_ROLE.items():
        if role is not Role.SERVER and role is not reading:
            table = plain[role.value]
            for name in path[:-1]:
                table = table[name]
            del table[path[-1]]
    return msgspec.json.encode(plain) + b"\n"


def of_role(settings: Settings, role: Role, **fields: Value) -> Settings:
    """Return the settings with fields of the server or of a kind of worker replaced."""
    own = settings.server if role is Role.SERVER else settings.worker(role)
    changed: dict[str, Any] = {role.value: replace(own, **fields)}
    return replace(settings, **changed)

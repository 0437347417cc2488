"""Structure of the settings: sections of config dataclasses, and paths to their fields. No I/O.

A path is a tuple of names such as `("server", "queue", "fair")`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from dataclasses import fields as fields_of
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from triolet.config import (
    AutoConfig,
    ControlConfig,
    FleetConfig,
    FleetModelConfig,
    LinkConfig,
    ProcessConfig,
    RayConfig,
    ServerConfig,
    StoreConfig,
    SupervisorConfig,
    WorkerConfig,
)
from triolet.errors import ConfigError
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

Path: TypeAlias = tuple[str, ...]
Kind: TypeAlias = Any
"""A type, or a typing construct such as a union."""
Value: TypeAlias = Any
"""The value of a field of any type."""

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
    "ray": RayConfig,
}
"""Config types of the sections. `worker` sets both kinds of worker, `link` every process."""
MODELS: Final = "models"
"""Section of named models, with one subsection per model."""
REDIS_URLS: Final = (("quotas", "limits"), ("redis", "url"))
"""Last two names in the paths of settings that may contain a password."""
_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
"""Pattern of model names, which appear in worker names, metrics and URL paths without escaping."""
_WHOLE_BLOCKS: Final = "KV is sent in whole blocks after each step; remove the setting"
GONE: Final[dict[Path, str]] = {
    ("link", "wire", "layer_groups"): _WHOLE_BLOCKS,
    ("link", "wire", "layer_group_min_tokens"): _WHOLE_BLOCKS,
    ("server", "hosts", "name"): "each process has a lease of its own; remove the setting",
    ("worker", "engine", "kv_wire"): "KV is sent in the computing dtype; remove the setting",
}
"""Removed fields, and what replaces them."""
ELSEWHERE: Final = {
    "link": "section [link]",
    "auto": "section [auto]",
    "model_dir": "fleet.model",
}
"""Fields of server and workers that are set once for all of them, with the place to set them."""
SPREAD: Final[dict[str, tuple[Path, ...]]] = {
    "worker": (("prefill",), ("decode",)),
    "link": tuple((role, "link") for role in ("server", "prefill", "decode", "control")),
    "auto": (("server", "auto"),),
}
"""Sections that set fields of several objects, or of an object elsewhere."""
ONE_ROLE: Final[dict[Path, Role]] = {
    ("kv_address",): Role.DECODE,
    ("advertised_kv_address",): Role.DECODE,
    ("speculation",): Role.DECODE,
    ("engine", "prompt_chunk_tokens"): Role.DECODE,
    ("engine", "embedding"): Role.PREFILL,
    ("max_waiting_tokens",): Role.PREFILL,
}
"""Worker fields and sections that only one role reads. `worker` sets them for this role."""
STDIN: Final = "-"
"""In place of a path: read settings from standard input."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of the processes of a fleet."""

    fleet: FleetConfig = field(default_factory=FleetConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    prefill: WorkerConfig = field(default_factory=WorkerConfig)
    decode: WorkerConfig = field(default_factory=WorkerConfig)
    process: ProcessConfig = field(default_factory=ProcessConfig)
    supervisor: SupervisorConfig = field(default_factory=SupervisorConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    models: Mapping[str, FleetModelConfig] = field(default_factory=dict)
    """Named models; empty for a single unnamed model, which is `fleet.model`."""

    def worker(self, role: Role) -> WorkerConfig:
        """Return the settings of a worker role."""
        return self.prefill if role is Role.PREFILL else self.decode


@cache
def types_of(kind: Kind) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, with their bounds."""
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: hints[one.name] for one in fields_of(kind)}


def is_section(kind: object) -> bool:
    """Return whether a type is a dataclass, whose fields are set individually."""
    return isinstance(kind, type) and is_dataclass(kind)


@cache
def leaves() -> dict[Path, Any]:
    """Return every settable path with its type, in the order of the sections."""
    return {
        path: kind
        for name, one in SECTIONS.items()
        for path, kind in _leaves(one, (name,))
        if spread(path)
    }


def reader(path: Path) -> Role | None:
    """Return the only worker role that reads a field, or None."""
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
    """Return a path as text, such as `server.queue.fair`."""
    return ".".join(path)


def find(path: Path) -> Kind:
    """Return the type of the value at a path; a dataclass for a section.

    Raises:
      ConfigError: the path is unknown; the text suggests a similar one.
    """
    if path in GONE:
        raise ConfigError(f"{dotted(path)} was removed: {GONE[path]}")
    kind: Any = None
    rest = list(enumerate(path))
    if path[0] == MODELS:
        if len(path) == 1:
            return Mapping
        try:
            require_model_name(path[1])
        except ConfigError as error:
            raise ConfigError(f"{MODELS}: {error}") from None
        kind, rest = FleetModelConfig, rest[2:]
    for depth, name in rest:
        known: Mapping[str, Any] = SECTIONS if depth == 0 else types_of(kind)
        if depth == 1:
            known = {one: inner for one, inner in known.items() if one not in ELSEWHERE}
        if name not in known:
            raise unknown(path, depth, known)
        kind = known[name]
        if depth and (role := reader(path[: depth + 1])) and path[0] not in ("worker", role.value):
            raise ConfigError(
                f"{dotted(path[: depth + 1])} has no effect: {path[0]} workers do not read it; "
                f"use {dotted((role.value, *path[1:]))}"
            )
        if depth + 1 < len(path) and not is_section(kind):
            raise ConfigError(f"{dotted(path[: depth + 1])} is a value and has no fields")
    return kind


def require_model_name(name: str) -> None:
    """Check that a name is a valid model name.

    Raises:
      ConfigError: it is not.
    """
    if not _MODEL_NAME.fullmatch(name):
        raise ConfigError(
            f"{shown(name)} is not a model name; allowed: 1 to 63 of the characters a-z, A-Z, 0-9, "
            "'.', '_' and '-', with a letter or digit first and last. Other names for clients can "
            f"be aliases ({MODELS}.NAME.aliases)"
        )


def path_of(text: str) -> Path:
    """Parse a dotted path. A model's name may contain dots."""
    text = text.strip()
    section, _, rest = text.partition(".")
    if section != MODELS:
        return tuple(text.split("."))
    name, _, last = rest.rpartition(".")
    return (section, *([name] if name else []), *([last] if last else []))


def unknown(path: Path, depth: int, known: Mapping[str, Any]) -> ConfigError:
    """Return an error about a path with an unknown name.

    Args:
      path: the path.
      depth: index of the unknown name in the path.
      known: names that are allowed in its place.
    """
    return ConfigError(f"{dotted(path[: depth + 1])} is unknown; {_advice(path, depth, known)}")


def _advice(path: Path, depth: int, known: Mapping[str, Any]) -> str:
    name = path[depth]
    if depth == 1 and name in ELSEWHERE:
        return f"set it by {ELSEWHERE[name]}"
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


def without_none(kind: Kind) -> Kind:
    """Return a type without None and without bounds."""
    origin: object = get_origin(kind)
    if origin is Annotated:
        return get_args(kind)[0]
    if origin in (Union, UnionType):
        return without_none(next(one for one in get_args(kind) if one is not NoneType))
    return kind


def nested(values: Mapping[Path, Value]) -> dict[str, Any]:
    """Convert values by path to nested tables."""
    tables: dict[str, Any] = {}
    for path, value in values.items():
        table = tables
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = value
    return tables


def shown(value: object) -> str:
    """Return the repr of a value for a message, truncated to 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:99]}…"


def spread(path: Path) -> list[Path]:
    """Return the paths of the objects' fields that a path of a section sets; only those of roles
    that read the field."""
    role = reader(path)
    return [
        (*target, *path[1:])
        for target in SPREAD.get(path[0], ((path[0],),))
        if role is None or target == (role.value,)
    ]


def show(value: Value) -> str:
    """Return a value as an operator would type it."""
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
    """Return the settings of one process as a line of JSON for `--config -`."""
    values: dict[Path, Any] = {("fleet", "model"): settings.fleet.model}
    for path in leaves():
        own = [one for one in spread(path) if one[0] in (role.value, "process")]
        if own and path[0] != "worker":
            values[path] = value_at(settings, own[0])
    return msgspec.json.encode(nested(values)) + b"\n"


def of_role(settings: Settings, role: Role, **fields: Value) -> Settings:
    """Return the settings with fields of the server or of a worker role replaced."""
    own = settings.server if role is Role.SERVER else settings.worker(role)
    changed: dict[str, Any] = {role.value: replace(own, **fields)}
    return replace(settings, **changed)

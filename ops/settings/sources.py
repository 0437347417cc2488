"""Collects settings from a file or pipe, `--set` and named options; later sources override earlier
ones.

Each value keeps its origin, which error messages and `triolet config show` name.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from triolet.config import AT, AUTO, LOOKUP, NO_GUESSES, has_password
from triolet.config.auto import GIVE_LADDER
from triolet.errors import ConfigError
from triolet.home import expanded
from triolet.units import MIB

from .conversion import GIVE_REF, Misfit, as_value, build, converted, from_text
from .form import (
    MODELS,
    REDIS_URLS,
    STDIN,
    Settings,
    dotted,
    find,
    is_section,
    path_of,
    shown,
    spread,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from triolet.ids import Role

    from .form import Path as FieldPath
    from .form import Value

SET: Final = "--set "
"""Prefix of the origin of an assignment."""
MAX_BYTES: Final = 1 * MIB
"""Limit of a document: about a hundred times the size of all fields together."""
_READ_BYTES: Final = 65_536
_HEADER: Final = re.compile(r"\s*\[([^\[\]]+)\]")
_KEY: Final = re.compile(r"\s*([\w.\"' -]+?)\s*=")
_PATHS: Final = (
    ("server", "tenants", "file"),
    ("server", "tenants", "quotas", "spend_file"),
    ("server", "batches", "directory"),
    ("server", "usage", "directory"),
    ("server", "objectives", "file"),
    ("server", "curve_dir"),
    ("server", "hosts", "secret_file"),
    ("server", "hosts", "ca_file"),
    ("prefill", "curve_dir"),
    ("decode", "curve_dir"),
    ("control", "state_dir"),
    ("control", "curve_dir"),
)
"""Fields that hold a path; made absolute, because processes may have other working directories."""


_OF_EVERY_ROLE: Final = frozenset({("fleet", "model"), ("fleet", "store"), ("fleet", "adapters")})
"""Fields of the fleet that roles started by themselves read too."""
OF_LONE_ROLES: Final = frozenset(
    "prefill_addresses decode_addresses spare_addresses listen_fd peers curve_dir name "
    "control_address kv_address advertised_kv_address health_address lending supervisor_pid "
    "models model_digest compute_digest model_adapters unnamed_adapters model_store directory "
    "control_addresses control_fleet address fleet members_file".split()
)
"""Fields for a role that is started without `triolet serve`."""
WORKERS_ADAPTERS: Final = ("engine", "adapters")
"""Internal field of a worker; users set `fleet.adapters`."""


@dataclass(slots=True)
class SettingSources:
    """Values by the paths of the objects' fields, each with its origin, such as `--port`.

    Attributes:
      given: all given values, unchecked, with path and origin.
      values: effective values.
      origins: origin of each value.
      written: path that each value was given for.
      words: the command-line words that stand for these settings.
    """

    given: list[tuple[FieldPath, Any, str]] = field(default_factory=list)
    values: dict[FieldPath, Any] = field(default_factory=dict)
    origins: dict[FieldPath, str] = field(default_factory=dict)
    written: dict[FieldPath, FieldPath] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def add(self, path: FieldPath, value: Value, origin: str) -> None:
        """Set a field, overriding an earlier value."""
        self.given.append((path, value, origin))
        for own in spread(path):
            self.values[own] = value
            self.origins[own] = origin
            self.written[own] = path

    def add_document(self, content: bytes, name: str) -> None:
        """Set the fields in a document, which is TOML or a JSON object.

        Raises:
          ConfigError: the document is malformed, or a field is invalid.
        """
        text = _text(content, name)
        table = _table(text, name)
        # Shared sections first, so that specific sections override them.
        for section in sorted(table, key=lambda one: one not in ("worker", "link")):
            self._add_table((section,), table[section], lambda path: f"{name}{_line(text, path)}")

    def _add_table(
        self, path: FieldPath, value: object, origin_of: Callable[[FieldPath], str]
    ) -> None:
        """Set a field, or all fields in a table of a section."""
        origin = origin_of(path)
        try:
            kind = find(path)
            if not is_section(kind) and path != (MODELS,):
                self.add(path, as_value(kind, value, path), origin)
                return
            if not isinstance(value, dict):
                raise ConfigError(f"{dotted(path)} is {shown(value)}; allowed: a table")
            if not value and (path == (AUTO,) or path[:-1] == (MODELS,)):
                remedy = GIVE_LADDER if path == (AUTO,) else GIVE_REF
                raise ConfigError(f"{dotted(path)} is empty; {remedy}")
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
        for name, inner in value.items():
            self._add_table((*path, name), inner, origin_of)

    def add_assignments(self, given: Iterable[str]) -> None:
        """Set fields from `--set section.field=value`.

        Raises:
          ConfigError: an assignment is malformed or invalid.
        """
        for text in given:
            self.words += ["--set", text]
            name, is_assigned, value = text.partition("=")
            path = path_of(name)
            if not is_assigned or len(path) < 2:
                raise ConfigError(
                    f"--set {name} is not an assignment; allowed: section.field=value, such as "
                    "server.queue.fair=false"
                )
            try:
                self.add_text(path, value.strip(), f"{SET}{name.strip()}")
            except ConfigError as error:
                raise ConfigError(f"{SET}{name.strip()}: {error}") from None

    def add_text(self, path: FieldPath, text: str, origin: str) -> None:
        """Set a field from the text of an argument.

        Raises:
          ConfigError: the field is unknown, or the value is invalid.
        """
        kind = find(path)
        value = as_value(kind, from_text(kind, text, path), path)
        if path[-2:] in REDIS_URLS and has_password(text):
            raise ConfigError(
                f"{dotted(path)} contains a password, which `ps` shows to every user; write the "
                "URL to a file and give @FILE"
            )
        self.add(path, value, origin)

    def refuse_for_serve(self) -> None:
        """Check that no field is set that `triolet serve` sets itself.

        Raises:
          ConfigError: a source sets one.
        """
        for path, origin in self.origins.items():
            is_own = path[-1] in OF_LONE_ROLES and len(path) == 2
            is_of_membership = path[1:2] == ("membership",) and path[0] != MODELS
            if is_own or is_of_membership or path[1:] == WORKERS_ADAPTERS:
                raise ConfigError(
                    f"{dotted(path)} ({origin}) is for a role that runs alone; leave it out: "
                    "`triolet serve` sets it"
                )
        self._refuse_unread("serve", lambda path: path[0] != "store")

    def refuse_for_store(self, command: str) -> None:
        """Check that `--set` sets only fields of the store. Files may contain other settings.

        Args:
          command: command of `triolet` that reads the settings.

        Raises:
          ConfigError: the command does not read a field.
        """
        is_collection = command == "model gc"

        def is_read(path: FieldPath) -> bool:
            is_of_snapshots = is_collection and path[1:] == ("engine", "snapshots", "folder")
            return path[0] == "store" or path == ("fleet", "store") or is_of_snapshots

        self._refuse_unread(command, is_read)

    def refuse_for_role(self, role: Role) -> None:
        """Check that `--set` sets only fields that a role reads. Files may contain other settings.

        Raises:
          ConfigError: the role does not read a field.
        """
        own = (role.value, "process")
        self._refuse_unread(role.value, lambda path: path[0] in own or path in _OF_EVERY_ROLE)

    def _refuse_unread(self, command: str, is_read: Callable[[FieldPath], bool]) -> None:
        read = {origin for path, origin in self.origins.items() if is_read(path)}
        for origin in self.origins.values():
            if origin.startswith(SET) and origin not in read:
                raise ConfigError(
                    f"{origin} has no effect: `triolet {command}` does not read this field; "
                    "leave it out"
                )

    def settings(self) -> Settings:
        """Validate the values and return the settings.

        Raises:
          ConfigError: a value or a combination is invalid; the text names its origin.
        """
        for path, value, origin in self.given:
            try:
                converted(value, find(path), path)
            except Misfit as error:
                raise ConfigError(f"{error} ({origin})") from None
        values = dict(self.values)
        for path in _PATHS:
            if given := values.get(path):
                values[path] = str(expanded(Path(given)).absolute())
        for path, value in values.items():
            if path[-2:] in REDIS_URLS and value.startswith(AT):
                values[path] = f"{AT}{expanded(Path(value[1:])).absolute()}"
        try:
            _resolve_draft(values, ("decode", "speculation", "source"))
            return build(values)
        except Misfit as error:
            raise ConfigError(self._explained(error)) from None

    def _explained(self, error: Misfit) -> str:
        """Return the text of an error with the path as the user wrote it and the origins."""
        path, depth = error.path, len(error.section)
        of_section = [one for one in self.values if one[:depth] == error.section]
        given = (
            [one for one in error.given if one in self.values]
            or [one for one in self.values if path[: len(one)] == one]
            + [one for one in of_section if one[-1] in error.said]
            or of_section
        )
        if not given:
            return str(error)
        own, written = given[0], self.written[given[0]]
        alike = takewhile(lambda pair: pair[0] == pair[1], zip(own, path, strict=False))
        shared = len(list(alike))
        # The path of a shared section is shorter than the paths of the objects' fields.
        shown_path = (*written[: shared + len(written) - len(own)], *path[shared:])
        origins = ", ".join(dict.fromkeys(self.origins[one] for one in given))
        return f"{dotted(shown_path)}{error.said} ({origins})"

    def origin(self, path: FieldPath) -> str:
        """Return the origin of a field's value."""
        return self.origins.get(spread(path)[0], "default")


def _resolve_draft(values: dict[FieldPath, Any], path: FieldPath) -> None:
    """Make the directory of a draft model absolute.

    Raises:
      Misfit: it is not a model directory.
    """
    source = values.get(path)
    if source is None or source in (NO_GUESSES, LOOKUP):
        return
    if not (Path(source) / "config.json").is_file():
        allowed = "off, lookup, or the directory of a draft model (there is no config.json)"
        raise Misfit(path, f" is {source!r}; allowed: {allowed}")
    values[path] = str(Path(source).resolve())


def read_settings(config: str | None, assignments: Iterable[str]) -> SettingSources:
    """Read settings from a file and from `--set`.

    Args:
      config: path of the file, or `-` for standard input; None for no file.
      assignments: values of `--set`.

    Raises:
      ConfigError: the file cannot be read, or a setting is invalid.
    """
    sources = SettingSources()
    sources.words += [] if config is None else ["--config", config]
    if config == STDIN:
        sources.add_document(read_stdin(), "standard input")
    elif config is not None:
        try:
            with Path(config).open("rb") as file:
                content = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"--config {config} cannot be read: {error.strerror}") from None
        sources.add_document(content, config)
    sources.add_assignments(assignments)
    return sources


def read_stdin() -> bytes:
    """Read a document from standard input: one line of JSON, or everything up to EOF.

    After a line of JSON, the pipe stays open until the supervisor ends.
    """
    content = b""
    while len(content) <= MAX_BYTES:
        part = os.read(0, _READ_BYTES)
        content += part
        if not part or (content.startswith(b"{") and part.endswith(b"\n") and _is_json(content)):
            break
    return content


def _is_json(content: bytes) -> bool:
    try:
        msgspec.json.decode(content)
    except msgspec.DecodeError:
        return False
    return True


def _text(content: bytes, name: str) -> str:
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name} is larger than {MAX_BYTES} bytes; give a settings file")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 text: {error}") from None


def _table(text: str, name: str) -> dict[str, Any]:
    try:
        is_json = text.lstrip().startswith("{")
        table = msgspec.json.decode(text) if is_json else tomllib.loads(text, parse_float=_finite)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is neither TOML nor JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{name} has no sections")
    return table


def _finite(text: str) -> float | str:
    """Parse a number. Infinity and NaN stay text, which numeric fields refuse."""
    number = float(text)
    return number if math.isfinite(number) else text


def _line(text: str, path: FieldPath) -> str:
    """Return `, line N` for the line of TOML that sets a path or a field below it, or an empty
    string."""
    path = tuple(dotted(path).split("."))
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _HEADER.match(line)) is not None:
            section = tuple(part.strip(" \"'") for part in header[1].split("."))
            if section[: len(path)] == path:
                return f", line {number}"
        elif (key := _KEY.match(line)) is not None:
            own = (*section, *(part.strip(" \"'") for part in key[1].split(".")))
            # The path may end within a dotted key (unknown section), or continue in an inline
            # table.
            shared = min(len(own), len(path))
            if shared > len(section) and own[:shared] == path[:shared]:
                return f", line {number}"
    return ""

"""Where settings come from: a file or a pipe, `--set`, named options; the later one counts.

Each value has its origin beside it, which errors and `triolet config show` name.
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
"""How the origin of an assignment begins."""
MAX_BYTES: Final = 1 * MIB
"""Of one document: some hundred times what all fields together take."""
_READ_BYTES: Final = 65_536
_HEADER: Final = re.compile(r"\s*\[([^\[\]]+)\]")
_KEY: Final = re.compile(r"\s*([\w.\"' -]+?)\s*=")
_PATHS: Final = (
    ("server", "tenants", "file"),
    ("server", "tenants", "quotas", "spend_file"),
    ("server", "batches", "directory"),
    ("server", "usage", "directory"),
    ("server", "curve_dir"),
    ("prefill", "curve_dir"),
    ("decode", "curve_dir"),
    ("control", "state_dir"),
)
"""Fields that hold a path. They are made absolute, so that every process means the same one."""


_OF_EVERY_ROLE: Final = frozenset({("fleet", "model"), ("fleet", "store"), ("fleet", "adapters")})
"""Fields of the fleet that single roles read: what they serve, and where it is."""
OF_LONE_ROLES: Final = frozenset(
    "prefill_addresses decode_addresses spare_addresses listen_fd peers curve_dir name "
    "control_address kv_address advertised_kv_address health_address lending supervisor_pid "
    "models model_digest compute_digest model_adapters unnamed_adapters model_store directory "
    "control_socket members_file".split()
)
"""Fields of a role that runs without `triolet serve`."""
WORKERS_ADAPTERS: Final = ("engine", "adapters")
"""What a worker is told; `fleet.adapters` is what users set."""


@dataclass(slots=True)
class SettingSources:
    """Values by the paths of the objects' own fields, each with its origin, such as `--port`.

    Attributes:
      given: each value that was given, with its path and origin, unchecked.
      values: what is set.
      origins: of each value.
      written: the path that each value was given for.
      words: of the command line that mean them.
    """

    given: list[tuple[FieldPath, Any, str]] = field(default_factory=list)
    values: dict[FieldPath, Any] = field(default_factory=dict)
    origins: dict[FieldPath, str] = field(default_factory=dict)
    written: dict[FieldPath, FieldPath] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def add(self, path: FieldPath, value: Value, origin: str) -> None:
        """Set a field; what was set before gives way."""
        self.given.append((path, value, origin))
        for own in spread(path):
            self.values[own] = value
            self.origins[own] = origin
            self.written[own] = path

    def add_document(self, content: bytes, name: str) -> None:
        """Set what a document says, which is TOML or one object of JSON.

        Raises:
          ConfigError: it cannot be read, or says something that cannot be.
        """
        text = _text(content, name)
        table = _table(text, name)
        # Sections for several objects first, so that one for a single object counts.
        for section in sorted(table, key=lambda one: one not in ("worker", "link")):
            self._add_table((section,), table[section], lambda path: f"{name}{_line(text, path)}")

    def _add_table(
        self, path: FieldPath, value: object, origin_of: Callable[[FieldPath], str]
    ) -> None:
        """Set a field, or all fields that a table of a section has."""
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
                raise ConfigError(f"{dotted(path)} says nothing; {remedy}")
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
        for name, inner in value.items():
            self._add_table((*path, name), inner, origin_of)

    def add_assignments(self, given: Iterable[str]) -> None:
        """Set what `--set section.field=value` says.

        Raises:
          ConfigError: one of them is not of this form, or cannot be.
        """
        for text in given:
            self.words += ["--set", text]
            name, is_assigned, value = text.partition("=")
            path = path_of(name)
            if not is_assigned or len(path) < 2:
                raise ConfigError(
                    f"--set {name} is no assignment; allowed: section.field=value, such as "
                    "server.queue.fair=false"
                )
            try:
                self.add_text(path, value.strip(), f"{SET}{name.strip()}")
            except ConfigError as error:
                raise ConfigError(f"{SET}{name.strip()}: {error}") from None

    def add_text(self, path: FieldPath, text: str, origin: str) -> None:
        """Set a field to what an argument says.

        Raises:
          ConfigError: there is no such field, or it cannot be that.
        """
        kind = find(path)
        value = as_value(kind, from_text(kind, text, path), path)
        if path[-1] == "limits" and has_password(text):
            raise ConfigError(
                f"{dotted(path)} holds a password, which `ps` shows to every user; write the URL "
                "to a file and give @FILE"
            )
        self.add(path, value, origin)

    def refuse_for_serve(self) -> None:
        """Refuse what `triolet serve` decides itself, of its own processes.

        Raises:
          ConfigError: the sources set it.
        """
        for path, origin in self.origins.items():
            is_own = path[-1] in OF_LONE_ROLES and len(path) == 2
            if is_own or path[1:] == WORKERS_ADAPTERS:
                raise ConfigError(
                    f"{dotted(path)} ({origin}) is for a role that runs alone; `triolet serve` "
                    "sets it itself: leave it out"
                )
        self._refuse_unread("serve", lambda path: path[0] != "store")

    def refuse_for_store(self, command: str) -> None:
        """Refuse what `--set` says of anything but the store. A file may serve fleets too.

        Args:
          command: of `triolet` that reads it.

        Raises:
          ConfigError: the command does not read it.
        """
        is_collection = command == "model gc"

        def is_read(path: FieldPath) -> bool:
            is_of_snapshots = is_collection and path[1:] == ("engine", "snapshots", "folder")
            return path[0] == "store" or path == ("fleet", "store") or is_of_snapshots

        self._refuse_unread(command, is_read)

    def refuse_for_role(self, role: Role) -> None:
        """Refuse what `--set` says of other processes. A file may serve several roles.

        Raises:
          ConfigError: the role does not read it.
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
        """Return the settings.

        Raises:
          ConfigError: the values cannot be together; the text names where they come from.
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
        limits = ("server", "tenants", "quotas", "limits")
        if values.get(limits, "").startswith(AT):
            values[limits] = f"{AT}{expanded(Path(values[limits][1:])).absolute()}"
        try:
            _resolve_draft(values, ("decode", "speculation", "source"))
            return build(values)
        except Misfit as error:
            raise ConfigError(self._explained(error)) from None

    def _explained(self, error: Misfit) -> str:
        """Return an error with the path as it was written, and with the origins of its values."""
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
        # A section for several objects has a shorter path than the objects' own fields.
        shown_path = (*written[: shared + len(written) - len(own)], *path[shared:])
        origins = ", ".join(dict.fromkeys(self.origins[one] for one in given))
        return f"{dotted(shown_path)}{error.said} ({origins})"

    def origin(self, path: FieldPath) -> str:
        """Return where the value of a field comes from."""
        return self.origins.get(spread(path)[0], "default")


def _resolve_draft(values: dict[FieldPath, Any], path: FieldPath) -> None:
    """Make the directory of a draft model absolute.

    Raises:
      Misfit: it is none.
    """
    source = values.get(path)
    if source is None or source in (NO_GUESSES, LOOKUP):
        return
    if not (Path(source) / "config.json").is_file():
        allowed = "off, lookup, or the directory of a draft model (there is no config.json)"
        raise Misfit(path, f" is {source!r}; allowed: {allowed}")
    values[path] = str(Path(source).resolve())


def read_settings(config: str | None, assignments: Iterable[str]) -> SettingSources:
    """Return what a file and `--set` say.

    Args:
      config: path of the file, or `-` for standard input; None for no file.
      assignments: of `--set`.

    Raises:
      ConfigError: it cannot be read, or cannot be.
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
    """Return a document from standard input: one line of JSON, or everything up to its end.

    After a line of JSON the pipe stays open: its end is the end of the supervisor.
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
        raise ConfigError(f"{name} is larger than {MAX_BYTES} bytes; allowed: settings alone")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is no text in UTF-8: {error}") from None


def _table(text: str, name: str) -> dict[str, Any]:
    try:
        is_json = text.lstrip().startswith("{")
        table = msgspec.json.decode(text) if is_json else tomllib.loads(text, parse_float=_finite)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is neither TOML nor JSON: {error}") from None
    if not isinstance(table, dict):
        raise ConfigError(f"{name} holds no sections")
    return table


def _finite(text: str) -> float | str:
    """Return a number; what is infinite or none stays text, which no field with numbers takes."""
    number = float(text)
    return number if math.isfinite(number) else text


def _line(text: str, path: FieldPath) -> str:
    """Return `, line N` of the line of TOML that sets a field, or a field of what a path names;
    nothing where it is not found."""
    path = tuple(dotted(path).split("."))
    section: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if (header := _HEADER.match(line)) is not None:
            section = tuple(part.strip(" \"'") for part in header[1].split("."))
            if section[: len(path)] == path:
                return f", line {number}"
        elif (key := _KEY.match(line)) is not None:
            own = (*section, *(part.strip(" \"'") for part in key[1].split(".")))
            # An unknown section is a part of its dotted key; an inline table sets the path's rest.
            shared = min(len(own), len(path))
            if shared > len(section) and own[:shared] == path[:shared]:
                return f", line {number}"
    return ""

"""Specification of a supervised process: command, environment, cores and settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triolet.ids import Role


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start.

    Attributes:
      name: unique name, such as `decode-0`.
      role: role; determines the order of shutdown.
      argv: program and arguments.
      env: variables added to the supervisor's environment.
      pass_fds: file descriptors that it inherits, with the same numbers.
      cores: cores that it may use; empty for all of the supervisor's.
      settings: written to its standard input, which stays open.
      arguments: arguments of `triolet`, so that a template can fork it; None for another program.
      model: name of the model of a worker; empty for servers, control, and workers of a single
        unnamed model.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    pass_fds: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    settings: bytes = b""
    arguments: tuple[str, ...] | None = None
    model: str = ""

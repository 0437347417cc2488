"""What a supervised process is, before it is one. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triolet.ids import Role


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to start.

    Attributes:
      name: unique among the supervised, such as `decode-0`.
      role: decides the order of shutdown.
      argv: program and arguments.
      env: added to the supervisor's own environment.
      pass_fds: file descriptors that it inherits, by the same numbers.
      cores: that it may use; none for all of the supervisor's.
      settings: written to its standard input at its start, which stays open.
      arguments: of the command `triolet`, where `argv` means that one: a template can fork it then.
        None for another program.
      model: the name of the model whose worker it is; empty for a server, and for a worker of the
        only model where that has no name.
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

"""What can be switched on and off, by name.

Knows the server's config; knows no load.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from triolet.config_queue import QueueConfig

if TYPE_CHECKING:
    from triolet.config import ServerConfig

EVERYTHING: Final = "everything"
NOTHING: Final = "nothing"
ALL: Final = (EVERYTHING, NOTHING)


def configured(config: ServerConfig, name: str) -> ServerConfig:
    """Return a server's config with some mechanisms on.

    Args:
      config: of whatever server.
      name: one of `ALL`.
    """
    return replace(config, queue=QueueConfig(fair=name != NOTHING))

"""What can be switched on and off, by name; and what a fleet of the lab's size is promised.

Knows the server's config; knows no load.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from triolet.config import ServerConfig

EVERYTHING: Final = "everything"
NOTHING: Final = "nothing"
ALL: Final = (EVERYTHING, NOTHING)


def configured(config: ServerConfig, name: str) -> ServerConfig:
    """Return a server's config with some mechanisms on."""
    return replace(config, queue=replace(config.queue, fair=name != NOTHING))

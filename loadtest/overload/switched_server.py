"""`python -m loadtest.overload.switched_server NAME server …`: a server with mechanisms switched.

The very `triolet server …`, whose config is changed to what NAME means (mechanisms.py) before it
starts. The product has options for bounds and promises; what would do without a whole mechanism is
of no use to an operator, and is a field of its config only.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ops.cli import main

from .mechanisms import configured

if TYPE_CHECKING:
    from triolet.config import ServerConfig


def run() -> int:
    """Switch, and become the server."""
    # Imported here by its command, which looks it up by this name.
    from server import main as entry

    serve, name = entry.main, sys.argv[1]

    def serve_switched(config: ServerConfig) -> None:
        serve(configured(config, name))

    setattr(entry, "main", serve_switched)  # noqa: B010
    return main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(run())

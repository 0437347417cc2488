"""What can be switched on and off, by name; and what a fleet of the lab's size promises.

Knows the server's config; knows no load.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ops.cli import main
from triolet.config import (
    AdmissionConfig,
    BrownoutConfig,
    GuardConfig,
    OverloadConfig,
    QueueConfig,
    SloConfig,
)

from .arrivals import SLO_S

if TYPE_CHECKING:
    from triolet.config import ServerConfig


EVERYTHING: Final = "everything"
NOTHING: Final = "nothing"
QUEUE, ADMISSION, BROWNOUT, GUARD = (
    f"without {name}" for name in ("fair queue", "admission", "brownout", "guard")
)
ALL: Final = (EVERYTHING, QUEUE, ADMISSION, BROWNOUT, GUARD, NOTHING)
QUEUE_ALONE: Final = "fair queue alone"
"""Nothing that refuses: for what is about order, and about nothing else."""

SLO: Final = SloConfig(critical_s=SLO_S, default_s=SLO_S, sheddable_s=SLO_S)
SHEDDABLE_MAX_TOKENS, DEFAULT_MAX_TOKENS, LONG_PROMPT_TOKENS = 16, 32, 200
"""The ladder's caps, at the size of what the lab asks for: about the median of a sheddable answer,
twice that of any other, and a prompt in fifty."""


def configured(config: ServerConfig, name: str) -> ServerConfig:
    """Return a server's config with the promises of the lab and some mechanisms on.

    Args:
      config: of whatever server.
      name: one of `ALL`, or `QUEUE_ALONE`.
    """
    refusing = {ADMISSION, BROWNOUT, GUARD}
    off = {NOTHING: {QUEUE, *refusing}, QUEUE_ALONE: refusing}.get(name, {name})
    overload = OverloadConfig(
        slo=SLO,
        admission=AdmissionConfig(is_on=ADMISSION not in off),
        brownout=BrownoutConfig(
            is_on=BROWNOUT not in off,
            sheddable_max_tokens=SHEDDABLE_MAX_TOKENS,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            long_prompt_tokens=LONG_PROMPT_TOKENS,
        ),
        guard=GuardConfig(is_on=GUARD not in off),
    )
    return replace(config, queue=QueueConfig(fair=QUEUE not in off), overload=overload)


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

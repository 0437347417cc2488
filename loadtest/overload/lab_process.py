"""`python -m loadtest.overload.lab_process MECHANISMS COST COMMAND …`: run `triolet` for the lab.

Enables the server's mechanisms given by MECHANISMS. COST is `computed`, or three numbers of seconds
separated by commas (modelled.py): steps then compute nothing and take the time of that formula, and
the transferred KV is noise. Everything else is the product: processes, sockets, frames, leases,
blocks. The product itself has no such switches.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from simulation.engine import only_token
from simulation.modelled import StepCost
from triolet.config import (
    AdmissionConfig,
    BrownoutConfig,
    GuardConfig,
    OverloadConfig,
    QueueConfig,
    SloConfig,
)
from triolet.ids import Role

from .arrivals import SLO_S

if TYPE_CHECKING:
    from triolet.config import ServerConfig

COMPUTED: Final = "computed"

EVERYTHING: Final = "everything"
NOTHING: Final = "nothing"
QUEUE, ADMISSION, BROWNOUT, GUARD = (
    f"without {name}" for name in ("fair queue", "admission", "brownout", "guard")
)
ALL: Final = (EVERYTHING, QUEUE, ADMISSION, BROWNOUT, GUARD, NOTHING)
QUEUE_ALONE: Final = "fair queue alone"
"""No mechanism that refuses: for experiments about the order of requests."""

SLO: Final = SloConfig(critical_s=SLO_S, default_s=SLO_S, sheddable_s=SLO_S)
SHEDDABLE_MAX_TOKENS, DEFAULT_MAX_TOKENS, LONG_PROMPT_TOKENS = 16, 32, 200
"""The brownout caps, scaled to the lab's requests: about the median of a sheddable answer, twice
that of any other, and one prompt in fifty."""


def configured(config: ServerConfig, name: str) -> ServerConfig:
    """Return a server config with the SLOs of the lab and the given mechanisms.

    Args:
      config: config of a server.
      name: name of the mechanisms: one of `ALL`, or `QUEUE_ALONE`.
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


def command(mechanisms: str, cost: StepCost | None) -> tuple[str, ...]:
    """Return the command for `triolet` with these mechanisms and step costs."""
    shown = COMPUTED if cost is None else ",".join(map(str, cost))
    return (sys.executable, "-m", "loadtest.overload.lab_process", mechanisms, shown)


def run() -> int:
    """Run a supervisor or one of its processes."""
    # Patch each name in the module that looks it up later.
    from ops.cli import main
    from ops.supervisor import serve

    mechanisms, shown, *arguments = sys.argv[1:]
    cost = None if shown == COMPUTED else StepCost(*map(float, shown.split(",")))
    setattr(serve, "command_line", lambda: command(mechanisms, cost))  # noqa: B010
    if arguments[0] == Role.SERVER:
        from server import main as entry

        serve_product = entry.main

        def serve_switched(config: ServerConfig) -> None:
            serve_product(configured(config, mechanisms))

        setattr(entry, "main", serve_switched)  # noqa: B010
    elif arguments[0] in {Role.PREFILL, Role.DECODE} and cost is not None:
        from simulation.timed import TimedEngine
        from worker import entry as worker_entry

        engine = partial(TimedEngine, cost=cost, tokens=only_token)
        setattr(worker_entry, "LocalEngine", engine)  # noqa: B010
    if arguments[0] == "serve":
        # A template would fork unpatched processes.
        arguments += ["--set", "supervisor.templates=false"]
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())

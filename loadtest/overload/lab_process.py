"""`python -m loadtest.overload.lab_process MECHANISMS COST COMMAND …`: `triolet` in the load lab.

The server's config is changed to what MECHANISMS means. COST is `computed`, or three numbers of
seconds with commas between (modelled.py): the workers' steps then last what that formula says while
the device thread sleeps. All else is the product: processes, sockets, frames, leases, blocks; the
KV that travels is noise. The product itself has no such switches.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from simulation.modelled import StepCost, paced, sampled
from triolet.config import (
    AdmissionConfig,
    BrownoutConfig,
    EngineConfig,
    GuardConfig,
    OverloadConfig,
    QueueConfig,
    SloConfig,
)
from triolet.ids import Role
from triolet.units import MILLISECONDS

from .arrivals import SLO_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Sampled, StepRow
    from engine.pace import Pace
    from triolet.config import ServerConfig

COMPUTED: Final = "computed"
FED_AHEAD_S: Final = 5 * MILLISECONDS
"""A step that is asked for so soon after the one before begins where that ended, as on a device
that is told its next step while it computes: what the host takes in between, which depends on who
else uses it, does not change what the fleet can do."""

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


def paced_engine(cost: StepCost) -> type:
    """Return the engine of a worker whose steps take time and compute nothing; loads torch."""
    from worker.local_engine import LocalEngine

    class PacedEngine(LocalEngine):
        """The real engine's pool and ledger."""

        _busy_until = 0.0

        def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
            """Sleep as long as the step takes."""
            now = time.monotonic()
            began_at = self._busy_until if now - self._busy_until < FED_AHEAD_S else now
            self._busy_until = began_at + cost.of(rows)
            time.sleep(max(0.0, self._busy_until - time.monotonic()))
            return sampled(rows)

        @property
        def pace(self) -> Pace:
            """What the formula makes of the step that the real engine was timed with."""
            real = super().pace
            config = EngineConfig(
                target_step_s=real.target_s,
                max_num_batched_tokens=real.most_tokens,
                prompt_chunk_tokens=real.chunk_tokens,
            )
            return paced(cost, config)

    return PacedEngine


def command(mechanisms: str, cost: StepCost | None) -> tuple[str, ...]:
    """Return what means `triolet` with these mechanisms, and steps of this cost."""
    shown = COMPUTED if cost is None else ",".join(map(str, cost))
    return (sys.executable, "-m", "loadtest.overload.lab_process", mechanisms, shown)


def run() -> int:
    """Become a supervisor, or one of its processes."""
    # Each is imported here by what looks it up by its name later.
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
        from worker import entry as worker_entry

        setattr(worker_entry, "LocalEngine", paced_engine(cost))  # noqa: B010
    if arguments[0] == "serve":
        # A template would fork the product's own processes.
        arguments += ["--set", "supervisor.templates=false"]
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())

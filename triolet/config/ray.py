"""Settings of `triolet fleet up --on ray`, which starts a fleet's processes on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass

from ..units import SECONDS
from .limits import (  # noqa: TC001 (get_type_hints reads the annotations)
    CountOrZero,
    LabelText,
    NotNegative,
    Positive,
)


@dataclass(frozen=True, slots=True)
class RayConfig:
    """A fleet on Ray. `fleet.servers`, `fleet.prefill` and `fleet.decode` count for each zone."""

    zones: tuple[LabelText, ...] = ()
    """Zones of the fleet, as nodes of Ray name theirs in the label `zone`; empty for one fleet
    without zones."""
    cpus: Positive = 1.0
    """CPUs that each process reserves on its node; also the threads of a worker without
    `worker.engine.threads`."""
    gpus: NotNegative = 0.0
    """GPUs that each worker reserves."""
    answer_timeout_s: Positive = 15.0 * SECONDS
    """For one answer of the cluster or of a process's actor. An actor that was just placed imports
    for some seconds."""
    place_timeout_s: Positive = 60.0 * SECONDS
    """For a node that can take a process; an autoscaler may have to start one."""
    start_timeout_s: Positive = 900.0 * SECONDS
    """From a process's placement until it is ready: large weights on a slow disk take minutes."""
    retry_s: Positive = 30.0 * SECONDS
    """A process that was given up after `supervisor.max_failed_starts` is started again this long
    after, on new ports."""
    parent_poll_s: Positive = 0.2 * SECONDS
    """Interval at which a process's actor checks that its node's raylet runs. Ray itself does not
    notice one that was killed and not reaped."""
    watch_s: Positive = 0.25 * SECONDS
    """Interval at which the stand-in of each zone asks the actors of its zone for their state, and
    time for their answers."""
    max_stand_ins: CountOrZero = 4
    """Lost processes that the stand-in of a zone runs at once, until Ray has restarted their
    actors. Nothing reserves memory for them; 0 for none."""
    stop_margin_s: Positive = 10.0 * SECONDS
    """A process that has not exited this long after its drain timeout is killed."""

"""How the models of a fleet are, as the supervisor tells commands."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from triolet.ids import Role  # noqa: TC001 (msgspec reads the annotations)
from triolet.status import GpuMemory  # noqa: TC001 (msgspec reads the annotations)


class RunState(StrEnum):
    """Whether the workers of a model run."""

    STOPPED = "stopped"
    STARTING = "starting"  # at least one is not ready, at the start or after its death
    RUNNING = "running"  # each one is ready
    STOPPING = "stopping"
    FAILED = "failed"  # one of them could not be kept alive, and the others were stopped


class RunningWorker(msgspec.Struct, frozen=True):
    """One worker that runs or should.

    Attributes:
      name: in logs and metrics.
      role: prefill or decode.
      pid: of its process; None where there is none.
      is_ready: whether it serves.
      gpu_memory: that it held when it became ready; None where it computes on a CPU.
    """

    name: str
    role: Role
    pid: int | None
    is_ready: bool
    gpu_memory: GpuMemory | None = None


class ModelStatus(msgspec.Struct, frozen=True):
    """One model.

    Attributes:
      name: empty for the only model where that has no name.
      state: of its workers together.
      workers: those of its own, and stand-ins that run.
      failure: why it failed, in one line.
      worker_seconds: how long processes of its workers have run together, since the fleet began;
        those that have ended are counted.
    """

    name: str
    state: RunState
    workers: list[RunningWorker]
    failure: str | None = None
    worker_seconds: float = 0.0

    @property
    def is_there(self) -> bool:
        """Whether its workers are kept running, or have not ended yet."""
        return self.state not in (RunState.STOPPED, RunState.FAILED)

"""Status of models and workers, as the supervisor reports it to commands and control."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from triolet.ids import Role  # noqa: TC001 (msgspec reads the annotations)
from triolet.status import GpuMemory  # noqa: TC001 (msgspec reads the annotations)


class RunState(StrEnum):
    """Whether the workers of a model run."""

    STOPPED = "stopped"
    STARTING = "starting"  # at least one worker is not ready, at the start or after a crash
    RUNNING = "running"  # every worker is ready
    STOPPING = "stopping"
    FAILED = "failed"  # one worker could not be kept alive, and the others were stopped


class RunningWorker(msgspec.Struct, frozen=True):
    """A worker that runs or is planned.

    Attributes:
      name: name in logs and metrics.
      role: prefill or decode.
      pid: process id; None if no process runs.
      is_ready: whether it serves.
      gpu_memory: GPU memory that it held when it became ready; None on a CPU.
    """

    name: str
    role: Role
    pid: int | None
    is_ready: bool
    gpu_memory: GpuMemory | None = None


class ModelStatus(msgspec.Struct, frozen=True):
    """Status of a model.

    Attributes:
      name: name of the model; empty for a single unnamed model.
      state: combined state of its workers.
      workers: its workers, and running spares.
      failure: why it failed, in one line.
      worker_seconds: total run time of its worker processes since the fleet started, including
        ended ones.
    """

    name: str
    state: RunState
    workers: list[RunningWorker]
    failure: str | None = None
    worker_seconds: float = 0.0

    @property
    def is_there(self) -> bool:
        """Whether any of its workers may exist."""
        return self.state not in (RunState.STOPPED, RunState.FAILED)

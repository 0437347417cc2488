"""The state that control keeps of one model: workers, memory, server activity and operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transport.control_protocol import ModelActivity, ModelState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from triolet.config import ControlledModelConfig

    from ..supervisor.model_status import RunningWorker
    from .operations import Operation


@dataclass(slots=True)
class Model:
    """One model.

    Attributes:
      config: fixed configuration.
      state: current state.
      size_bytes: measured or expected memory of its workers.
      is_guess: whether `size_bytes` was never measured.
      is_measured: whether `size_bytes` was measured on the current workers.
      since: time of the last load.
      load_began_at: start of the current load from disk or page cache, else None.
      last_used_at: when a request last arrived or ended; initially the start of control.
      was_used: whether any request arrived.
      changed_at: when its state last changed.
      origin: state from which it was last loaded.
      workers: last report of the supervisor.
      gpu_bytes: GPU memory by UUID that its workers held when they were last all ready.
      activity: last report of each server.
      busy_since: start of the current period with requests, or None.
      running: current operation.
      waiting: next operation.
      waits_since: since when `waiting` waits.
      is_kept: whether a switch needs it in memory.
      failed_at: end of the last failed load, unless one succeeded since.
    """

    config: ControlledModelConfig
    state: ModelState
    size_bytes: int
    since: float
    last_used_at: float
    changed_at: float
    load_began_at: float | None = None
    was_used: bool = False
    is_guess: bool = True
    is_measured: bool = False
    origin: ModelState = ModelState.STAGED
    workers: list[RunningWorker] = field(default_factory=list)
    gpu_bytes: dict[str, int] = field(default_factory=dict)
    activity: dict[str, ModelActivity] = field(default_factory=dict)
    busy_since: float | None = None
    running: Operation | None = None
    waiting: Operation | None = None
    waits_since: float = 0.0
    is_kept: bool = False
    failed_at: float | None = None

    def __post_init__(self) -> None:
        if self.config.workers_of:
            self.state, self.is_measured = ModelState.WARM, True

    def note_gpus(self) -> dict[str, int]:
        """Record the GPU memory of its workers once all are ready. Return the total memory of each
        of these GPUs."""
        told = [worker.gpu_memory for worker in self.workers if worker.gpu_memory is not None]
        if self.workers and all(worker.is_ready for worker in self.workers):
            self.gpu_bytes = {}
            for one in told:
                self.gpu_bytes[one.gpu] = self.gpu_bytes.get(one.gpu, 0) + one.bytes
        return {one.gpu: one.total_bytes for one in told}

    def note_requests(self, now: float) -> None:
        """Update `busy_since` after a server's report has changed."""
        since = now if self.busy_since is None else self.busy_since
        self.busy_since = since if self.num_requests else None

    @property
    def is_pinned(self) -> bool:
        """Whether it is never evicted."""
        return self.config.pinned or self.is_kept

    @property
    def live(self) -> Operation | None:
        """The latest unfinished operation."""
        return self.waiting or self.running

    @property
    def num_requests(self) -> int:
        """Running and waiting requests at all servers."""
        return sum(one.in_flight for one in self.activity.values())

    @property
    def is_ready(self) -> bool:
        """Whether each of its roles has a ready worker."""
        roles = {worker.role for worker in self.workers}
        return bool(roles) and roles == {w.role for w in self.workers if w.is_ready}

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of its running workers."""
        return tuple(worker.pid for worker in self.workers if worker.pid is not None)


def owner_of(models: Mapping[str, Model], name: str) -> str:
    """Return the model that has the workers of a model: itself, or another version."""
    model = models.get(name)
    return name if model is None else model.config.workers_of or name

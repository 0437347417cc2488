"""What control knows of one model. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triolet.control_protocol import ModelActivity, ModelState

if TYPE_CHECKING:
    from triolet.config import ControlledModelConfig

    from ..supervisor.model_status import RunningWorker
    from .operations import Operation


@dataclass(slots=True)
class Model:
    """One model.

    Attributes:
      config: what is fixed.
      state: now.
      size_bytes: measured memory of its workers, or what is expected.
      is_guess: whether that was never measured.
      is_measured: whether it is of the workers that run now.
      since: when it was last told to load.
      load_began_at: the same while it loads from disk or page cache; None otherwise.
      last_used_at: when a request last came or ended; the start of control if none did.
      was_used: whether any request came.
      changed_at: when its state last changed.
      origin: state that it is or was loaded from.
      workers: as the supervisor last said.
      gpu_bytes: of GPUs' memory, by UUID, that its workers held when they last were all ready.
      activity: what each server last said.
      busy_since: since when servers have told of requests without a pause; None while there are
        none.
      running: operation under way.
      waiting: operation that comes next.
      waits_since: of the latter.
      is_kept: whether a switch needs it in memory, whatever other models want.
      failed_at: end of the last load that failed, unless one succeeded since.
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

    def note_gpus(self) -> dict[str, int]:
        """Take in what its workers hold of GPUs once all of them are ready; return the memory that
        each of these GPUs has."""
        told = [worker.gpu_memory for worker in self.workers if worker.gpu_memory is not None]
        if self.workers and all(worker.is_ready for worker in self.workers):
            self.gpu_bytes = {}
            for one in told:
                self.gpu_bytes[one.gpu] = self.gpu_bytes.get(one.gpu, 0) + one.bytes
        return {one.gpu: one.total_bytes for one in told}

    def note_requests(self, now: float) -> None:
        """Take in that what servers say of its requests has changed."""
        since = now if self.busy_since is None else self.busy_since
        self.busy_since = since if self.num_requests else None

    @property
    def is_pinned(self) -> bool:
        """Whether it keeps its memory, whatever other models want."""
        return self.config.pinned or self.is_kept

    @property
    def live(self) -> Operation | None:
        """The operation that counts last."""
        return self.waiting or self.running

    @property
    def num_requests(self) -> int:
        """Requests that run or wait for it at all servers."""
        return sum(one.in_flight for one in self.activity.values())

    @property
    def is_ready(self) -> bool:
        """Whether each role that it has workers of has one that is ready."""
        roles = {worker.role for worker in self.workers}
        return bool(roles) and roles == {w.role for w in self.workers if w.is_ready}

    @property
    def pids(self) -> tuple[int, ...]:
        """Its worker processes that run."""
        return tuple(worker.pid for worker in self.workers if worker.pid is not None)

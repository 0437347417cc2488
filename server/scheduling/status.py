"""A look at the fleet at one moment, for readiness, metrics and people: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from triolet.service_class import ServiceClass

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from transport.frames import Capacity, Load
    from triolet.ids import Role

    from .queue import FairQueue
    from .workers import Worker


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker.

    Attributes:
      role: prefill or decode.
      name: its own, or its address as long as it has not answered.
      address: where it is reached.
      state: connecting, alive, suspect, draining or dead.
      fingerprint: of its model; empty until it answered.
      capacity: what it has; None until it answered.
      load: what it last said it does.
      attempts: this server's attempts there.
      breaker: closed, open or half_open; unless closed it is left out, or tried.
      trouble: why it does not answer or is not used, in words; empty if nothing is known.
    """

    role: Role
    name: str
    address: str
    state: str
    fingerprint: str
    capacity: Capacity | None
    load: Load
    attempts: int
    breaker: str
    trouble: str


@dataclass(frozen=True, slots=True)
class OverloadStatus:
    """What admission sees.

    Attributes:
      brownout: level, 0 to 4.
      pressure: predicted wait of the default class, of what it may wait.
      guard_tokens: prompt tokens that may be owed a first token; None for no limit.
      owed_tokens: that are.
      expected_returns: refused requests that were told when to come back, and are expected.
      tokens_per_s: at which the line moves; None if that is not known.
      error_s: mean error of predicted first tokens, of late.
    """

    brownout: int = 0
    pressure: float = 0.0
    guard_tokens: float | None = None
    owed_tokens: int = 0
    expected_returns: int = 0
    tokens_per_s: float | None = None
    error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """All workers and requests.

    Attributes:
      workers: in the order of the configuration, prefill first.
      is_ready: a decode worker takes requests, and so does a prefill worker with the same model,
        or decode computes prompts itself.
      is_draining: this server takes nothing new.
      queued: requests that wait for workers.
      running: requests that workers are busy with.
      max_model_len: most tokens of prompt and completion together.
      received: requests submitted so far.
      accepted: of these, taken on.
      rejected: of these, refused; by error code.
      ended: terminal events so far; by outcome.
      retries_left: attempts after faults that the retry budget can pay for.
      quarantined: prompts and grammars that are refused for what they did to workers.
      overload: what admission sees.
      queued_by_class: those that wait, by service class.
      queues: which can be asked for what takes a look at every tenant.
    """

    workers: tuple[WorkerStatus, ...]
    is_ready: bool
    is_draining: bool
    queued: int
    running: int
    max_model_len: int
    received: int
    accepted: int
    rejected: Mapping[str, int]
    ended: Mapping[str, int]
    retries_left: float
    quarantined: int
    overload: OverloadStatus
    queued_by_class: Mapping[str, int]
    queues: tuple[FairQueue[Any], ...]

    @property
    def queue_lag_tokens(self) -> float:
        """By how many tokens of weight 1 the tenants that wait are apart, when this is asked."""
        return max((one.lag_tokens for queue in self.queues for one in queue.classes), default=0.0)


def present(workers: Iterable[Worker], spare_addresses: Collection[str]) -> list[Worker]:
    """Return the workers that there are or should be; a spare one counts while it is there."""
    return [w for w in workers if w.is_connected or w.address not in spare_addresses]


def queued_by_class(queues: Iterable[FairQueue[Any]]) -> dict[str, int]:
    """Return how many wait, by the names of service classes."""
    queues = tuple(queues)
    return {
        service_class.name.lower(): sum(q.classes[service_class].num_waiting for q in queues)
        for service_class in ServiceClass
    }


def worker_status(worker: Worker) -> WorkerStatus:
    """Return how a worker is shown."""
    peer_id = worker.peer_id
    is_leaving = worker.is_connected and worker.is_draining
    return WorkerStatus(
        role=worker.role,
        name=worker.address if peer_id is None else peer_id.name,
        address=worker.address,
        state="draining" if is_leaving else worker.monitor.state.value,
        fingerprint=worker.fingerprint,
        capacity=worker.capacity,
        load=worker.load,
        attempts=len(worker.shares),
        breaker=worker.breaker.state.value,
        trouble=worker.trouble,
    )

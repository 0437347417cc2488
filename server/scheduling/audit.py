"""Fleet audits: compares the server's record of attempts with each worker's account.

triolet/invariants.py judges the result. Frames on a link keep their order: what the server sent
before AUDIT is in the worker's answer, and what the worker did before answering has arrived here
when the answer is read. An attempt that the server counted neither before nor after, or that the
worker lacks although the server counted it both times, is in doubt. Each doubt's start time is kept
across audits, because a lossy link can cause a doubt that lasts a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from triolet.audit import MAX_SECONDS, AttemptAudit, Doubt, FleetAudit, ServerAudit, WorkerView
from triolet.errors import overloaded
from triolet.ids import shown_epoch

from .status import present, worker_status

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from transport.frames import Audited
    from triolet.audit import ProcessFacts, WorkerAudit
    from triolet.config import ServerConfig
    from triolet.ids import PeerId

    from .requests import Requests
    from .workers import Worker


@dataclass(slots=True, eq=False)
class Survey:
    """One round of an audit.

    Attributes:
      serial: the round's number, echoed by the answers.
      asked: the workers asked, with the attempts the server counted on each.
      answers: the answers so far, by worker.
    """

    serial: int
    asked: dict[Worker, tuple[AttemptAudit, ...]]
    answers: dict[Worker, WorkerView] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Return whether every worker has answered or disconnected."""
        return all(worker in self.answers or not worker.is_connected for worker in self.asked)


@dataclass(slots=True)
class _Doubts:
    """Doubts about one epoch of a worker at the last audit, with the time each began."""

    epoch: str
    unknown: dict[str, float] = field(default_factory=dict)
    missing: dict[str, float] = field(default_factory=dict)


class Auditor:
    """Runs the audits of one server.

    Args:
      me: the server's identity and epoch.
      config: bounds and deadlines.
      workers: the fleet's workers, shared with `Requests`.
      requests: the server's requests.
    """

    def __init__(
        self, me: PeerId, config: ServerConfig, workers: Sequence[Worker], requests: Requests
    ) -> None:
        self._me = me
        self._config = config
        self._workers = workers
        self._requests = requests
        self._serial = 0
        self._open: dict[int, Survey] = {}
        self._doubts: dict[Worker, _Doubts] = {}

    def begin(self) -> Survey:
        """Open a round. Send its AUDIT frames before any other frame.

        Raises:
          RequestError: the maximum number of rounds is open.
        """
        if len(self._open) >= self._config.max_audits:
            raise overloaded("too many audits run at once; wait for one to finish", 1.0)
        self._serial += 1
        connected = [worker for worker in self._workers if worker.is_connected]
        asked = {worker: self._attempts(worker) for worker in connected}
        survey = self._open[self._serial] = Survey(self._serial, asked)
        return survey

    def take(self, worker: Worker, frame: Audited, now: float) -> None:
        """Record a worker's answer; ignore it if it is late."""
        survey = self._open.get(frame.serial)
        if survey is None or worker not in survey.asked or worker in survey.answers:
            return
        if not _is_of(worker, frame.account):
            return  # from an earlier epoch
        before, after = survey.asked[worker], self._attempts(worker)
        unknown, missing = self._weigh(worker, frame.account, before, after, now)
        survey.answers[worker] = _view(
            worker,
            audit=frame.account,
            before=before,
            after=after,
            unknown=unknown,
            missing=missing,
        )

    def forget(self, worker: Worker) -> None:
        """Drop the doubts about a worker that has left the fleet."""
        self._doubts.pop(worker, None)

    def close(self, survey: Survey) -> None:
        """End a round, answered or not. Idempotent."""
        self._open.pop(survey.serial, None)

    def result(
        self, survey: Survey, now: float, connections: int, process: ProcessFacts
    ) -> FleetAudit:
        """Return the result of a round."""
        return FleetAudit(
            grace_s=self._config.link.lease_ttl_s,
            server=self.server(now, connections, process),
            workers=tuple(
                survey.answers.get(worker) or self._silent(worker, survey)
                for worker in present(self._workers, self._config.spare_addresses)
            ),
        )

    def server(self, now: float, connections: int, process: ProcessFacts) -> ServerAudit:
        """Return the server's own account."""
        requests, accounting = self._requests, self._requests.table.accounting
        deadlines = [one.deadline for one in requests.table]
        return ServerAudit(
            name=self._me.name,
            epoch=shown_epoch(self._me.epoch),
            received=accounting.received,
            accepted=accounting.accepted,
            rejected=dict(accounting.rejected),
            ended=dict(accounting.ended),
            in_flight=requests.num_in_flight,
            waiting=requests.num_queued,
            running=sum(one.attempt is not None for one in requests.table),
            overdue_s=now - min(deadlines) if deadlines else -MAX_SECONDS,
            connections=connections,
            is_draining=requests.is_draining,
            process=process,
        )

    def _attempts(self, worker: Worker) -> tuple[AttemptAudit, ...]:
        return tuple(
            AttemptAudit(
                attempt=str(key),
                is_asked=share.is_asked,
                is_granted=share.is_granted,
                is_wanted=self._requests.is_wanted(worker, key),
            )
            for key, share in worker.shares.items()
        )

    def _silent(self, worker: Worker, survey: Survey) -> WorkerView:
        silence = f"it is {worker_status(worker).state}"
        if worker.trouble:
            silence = f"it {worker.trouble}"
        if worker.is_connected:
            silence = f"no answer within {self._config.audit_timeout_s:g} s"
        attempts = self._attempts(worker)
        before = survey.asked.get(worker, attempts)
        return _view(worker, silence=silence, before=before, after=attempts)

    def _weigh(
        self,
        worker: Worker,
        audit: WorkerAudit,
        before: tuple[AttemptAudit, ...],
        after: tuple[AttemptAudit, ...],
        now: float,
    ) -> tuple[tuple[Doubt, ...], tuple[Doubt, ...]]:
        """Return the leases that the server does not know, and the attempts that the worker
        lacks."""
        doubts = self._doubts.get(worker)
        if doubts is None or doubts.epoch != audit.epoch:
            doubts = self._doubts[worker] = _Doubts(audit.epoch)
        known = {attempt.attempt for attempt in (*before, *after)}
        mine = str(self._me)
        unknown = [lease.attempt for lease in audit.leases if lease.server == mine]
        doubts.unknown = _since(doubts.unknown, (u for u in unknown if u not in known), now)
        missing: set[str] = set()
        if not audit.is_cut:
            missing = {a.attempt for a in before if a.is_asked} & {a.attempt for a in after}
            missing -= {lease.attempt for lease in audit.leases}
        doubts.missing = _since(doubts.missing, missing, now)
        return _lasting(doubts.unknown, now), _lasting(doubts.missing, now)


def _since(earlier: dict[str, float], present: Iterable[str], now: float) -> dict[str, float]:
    return {attempt: earlier.get(attempt, now) for attempt in present}


def _lasting(since: dict[str, float], now: float) -> tuple[Doubt, ...]:
    return tuple(Doubt(attempt, now - first) for attempt, first in since.items())


def _epoch(worker: Worker) -> str:
    return "" if worker.welcome is None else shown_epoch(worker.welcome.peer.epoch)


def _is_of(worker: Worker, account: WorkerAudit) -> bool:
    """Return whether an account is of the worker's current epoch; the previous release sent it in
    another format."""
    if worker.welcome is None:
        return False
    epoch = worker.welcome.peer.epoch
    return account.epoch in (shown_epoch(epoch), f"{epoch:016x}")


def _view(
    worker: Worker,
    *,
    before: tuple[AttemptAudit, ...],
    after: tuple[AttemptAudit, ...],
    silence: str = "",
    audit: WorkerAudit | None = None,
    unknown: tuple[Doubt, ...] = (),
    missing: tuple[Doubt, ...] = (),
) -> WorkerView:
    status = worker_status(worker)
    return WorkerView(
        role=worker.role,
        address=worker.address,
        name=status.name,
        state=status.state,
        epoch=_epoch(worker),
        silence=silence,
        audit=audit,
        before=before,
        after=after,
        unknown=unknown,
        missing=missing,
        available_blocks=worker.available_blocks,
        token_credit=0 if worker.beat is None else worker.beat.token_credit,
        row_credit=0 if worker.beat is None else worker.beat.row_credit,
    )

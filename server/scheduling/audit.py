"""Puts together what the server counts and what its workers say, as near to one moment as can be.

triolet/invariants.py judges it. Frames of a link keep their order:
what was asked of a worker before the AUDIT is in its answer, and what it did before it answered is
known here when the answer is read. So an attempt that the server counted at neither time, or that
the worker lacks though the server counted it at both, is in doubt; how long it has been so is
remembered from audit to audit, because on a link that loses frames it may be so for a while.
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
    """One round of questions.

    Attributes:
      serial: comes back with the answers.
      asked: the workers that were asked, and what the server counted there then.
      answers: by worker.
    """

    serial: int
    asked: dict[Worker, tuple[AttemptAudit, ...]]
    answers: dict[Worker, WorkerView] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether no worker is left that could still answer."""
        return all(worker in self.answers or not worker.is_connected for worker in self.asked)


@dataclass(slots=True)
class _Doubts:
    """What was in doubt about one life of a worker at the last audit, and since when."""

    epoch: str
    unknown: dict[str, float] = field(default_factory=dict)
    missing: dict[str, float] = field(default_factory=dict)


class Auditor:
    """All audits of one server.

    Args:
      me: this life of the server.
      config: bounds and deadlines.
      workers: as of Requests.
      requests: the server's own counts.
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
        """Open a round: its AUDIT frames must be sent at once, before anything else is.

        Raises:
          RequestError: as many as may be are open.
        """
        if len(self._open) >= self._config.max_audits:
            raise overloaded("too many audits at once; read the answer of one first", 1.0)
        self._serial += 1
        connected = [worker for worker in self._workers if worker.is_connected]
        asked = {worker: self._attempts(worker) for worker in connected}
        survey = self._open[self._serial] = Survey(self._serial, asked)
        return survey

    def take(self, worker: Worker, frame: Audited, now: float) -> None:
        """Take in an answer; one that comes too late is dropped."""
        survey = self._open.get(frame.serial)
        if survey is None or worker not in survey.asked or worker in survey.answers:
            return
        if not _is_of(worker, frame.account):
            return  # a life that is over
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
        """Keep nothing of a worker that is no member any more."""
        self._doubts.pop(worker, None)

    def close(self, survey: Survey) -> None:
        """End a round, answered or not. Idempotent."""
        self._open.pop(survey.serial, None)

    def result(
        self, survey: Survey, now: float, connections: int, process: ProcessFacts
    ) -> FleetAudit:
        """Return what a round has brought."""
        return FleetAudit(
            grace_s=self._config.link.lease_ttl_s,
            server=self.server(now, connections, process),
            workers=tuple(
                survey.answers.get(worker) or self._silent(worker, survey)
                for worker in present(self._workers, self._config.spare_addresses)
            ),
        )

    def server(self, now: float, connections: int, process: ProcessFacts) -> ServerAudit:
        """Return the server's own accounts."""
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
        """Return leases that the server does not know, and attempts that the worker lacks."""
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
    """Return whether an account is of a worker's present life; the release before told epochs."""
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

"""Tests of the auditor, which compares the leases of the server and its workers: a difference is a
violation only if it stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from server.contract.generation import CancelReason
from server.scheduling.audit import Auditor
from server.scheduling.request import Phase
from transport.frames import Audit, Audited, EndReason
from triolet.audit import FleetAudit, ProcessFacts
from triolet.errors import RequestError
from triolet.ids import AttemptKey, PeerId, Role
from triolet.invariants import check_at_rest, check_invariants

from .fakes import make_request
from .stages import UNFINISHED, brought_to
from .world import World

if TYPE_CHECKING:
    from server.scheduling.audit import Survey
    from server.scheduling.workers import Worker

ME = PeerId(Role.SERVER, "server", 1)
HERE = ProcessFacts(pid=1)
KEY = AttemptKey((1).to_bytes(16, "big"), 0)


class Auditing:
    """A world with an auditor. Its AUDIT frames wait in the same queues as all others."""

    def __init__(self, num_decodes: int = 1, *, connect: bool = True, **config: object) -> None:
        self.world = World(1, num_decodes, connect=connect, **config)
        for fake in self.world.of.values():
            fake.server = str(ME)
        world = self.world
        self.auditor = Auditor(ME, world.config, world.workers, world.requests)

    def ask(self) -> Survey:
        """Open a round and send its frames."""
        survey = self.auditor.begin()
        for worker in survey.asked:
            self.world.up[worker].append(Audit(survey.serial))
        return survey

    def deliver(self) -> None:
        """Deliver all frames; answers go to the auditor."""
        world = self.world
        while any(map(world.deliver_up, world.workers)) or any(world.down.values()):
            for worker in world.workers:
                while world.down[worker]:
                    self.deliver_down(worker)

    def deliver_down(self, worker: Worker) -> None:
        """Deliver one frame of a worker."""
        frame = self.world.down[worker][0]
        if isinstance(frame, Audited):
            self.world.down[worker].popleft()
            self.auditor.take(worker, frame, self.world.now)
        else:
            self.world.deliver_down(worker)

    def result(self, survey: Survey) -> FleetAudit:
        self.auditor.close(survey)
        return self.auditor.result(survey, self.world.now, 5, HERE)

    def audit(self) -> FleetAudit:
        """Run a whole audit and return its result."""
        survey = self.ask()
        self.deliver()
        assert survey.is_complete
        return self.result(survey)

    @property
    def decode(self) -> Worker:
        return self.world.worker(self.world.decode)


@pytest.mark.parametrize("phase", UNFINISHED)
def test_a_fleet_at_work_is_told_without_a_violation(phase: Phase) -> None:
    auditing = Auditing()
    brought_to(auditing.world, phase)
    audit = auditing.audit()
    assert check_invariants(audit) == []
    assert (audit.server.in_flight, audit.server.connections) == (1, 5)
    assert audit.server.process == HERE
    assert [view.name for view in audit.workers] == ["prefill-0", "decode-0"]
    assert all(view.state == "alive" and view.silence == "" for view in audit.workers)
    assert not any(view.unknown for view in audit.workers)
    # If the request is still reserving, its RESERVE was lost.
    assert bool(audit.workers[1].missing) is (phase is Phase.RESERVING)


def test_server_and_worker_name_an_attempt_alike() -> None:
    auditing = Auditing()
    brought_to(auditing.world, Phase.DECODING)
    _, decode = auditing.audit().workers
    assert decode.audit is not None
    [attempt], [lease] = decode.before, decode.audit.leases
    assert attempt.attempt == lease.attempt == str(KEY)
    assert attempt.is_asked
    assert attempt.is_granted
    assert attempt.is_wanted


def test_nothing_is_left_at_rest() -> None:
    auditing = Auditing()
    reader = auditing.world.submit(make_request())
    auditing.world.settle()
    assert reader.finished
    for worker in auditing.world.workers:
        auditing.world.beat(worker)
    audit = auditing.audit()
    assert check_at_rest(audit) == []
    assert audit.server.ended == {"length": 1}
    _, decode = audit.workers
    assert decode.available_blocks == auditing.world.decode.num_blocks
    assert decode.row_credit == auditing.world.decode.row_credit


def test_an_attempt_that_ends_while_the_answer_is_under_way_is_no_violation() -> None:
    auditing = Auditing()
    reader = brought_to(auditing.world, Phase.DECODING)
    survey = auditing.ask()
    auditing.world.deliver_up(auditing.decode)
    auditing.world.cancel(reader, CancelReason.CLIENT_GONE)
    auditing.deliver()
    audit = auditing.result(survey)
    _, decode = audit.workers
    assert len(decode.before) == 1
    assert decode.after == ()
    assert not decode.unknown
    assert check_invariants(audit) == []


def test_an_attempt_that_begins_while_the_question_is_under_way_is_no_violation() -> None:
    auditing = Auditing()
    survey = auditing.ask()
    auditing.world.submit(make_request())
    auditing.deliver()
    audit = auditing.result(survey)
    _, decode = audit.workers
    assert decode.before == ()
    assert len(decode.after) == 1
    assert not decode.missing
    assert check_invariants(audit) == []


def test_a_lease_that_the_server_does_not_know_is_a_violation_if_it_stays() -> None:
    auditing = Auditing()
    reader = brought_to(auditing.world, Phase.DECODING)
    auditing.world.cancel(reader, CancelReason.CLIENT_GONE)
    auditing.world.up[auditing.decode].clear()  # its END is lost
    first = auditing.audit()
    assert [(d.attempt, d.for_s) for d in first.workers[1].unknown] == [(str(KEY), 0.0)]
    assert check_invariants(first) == []
    auditing.world.now += 3.9
    assert check_invariants(auditing.audit()) == []
    auditing.world.now += 0.2
    [violation] = check_invariants(auditing.audit())
    assert (violation.invariant, violation.where) == ("I2", "decode-0")
    auditing.world.decode.end(KEY, EndReason.LEASE_EXPIRED)
    assert check_invariants(auditing.audit()) == []


def test_another_servers_lease_is_not_in_doubt() -> None:
    auditing = Auditing()
    brought_to(auditing.world, Phase.DECODING)
    auditing.world.decode.server = "other@0000000000000009"
    _, decode = auditing.audit().workers
    assert decode.unknown == ()


def test_an_attempt_that_its_worker_lost_is_a_violation_if_it_stays() -> None:
    auditing = Auditing()
    brought_to(auditing.world, Phase.DECODING)
    auditing.world.decode.end(KEY, EndReason.ERROR)  # and its ENDED is lost
    assert [d.for_s for d in auditing.audit().workers[1].missing] == [0.0]
    auditing.world.now += 4.1
    [violation] = check_invariants(auditing.audit())
    assert (violation.invariant, violation.where) == ("I10", "decode-0")


def test_doubts_end_with_the_life_that_they_are_about() -> None:
    auditing = Auditing()
    reader = brought_to(auditing.world, Phase.DECODING)
    auditing.world.cancel(reader, CancelReason.CLIENT_GONE)
    auditing.world.up[auditing.decode].clear()
    assert auditing.audit().workers[1].unknown
    decode = auditing.decode
    auditing.world.lose(decode)
    auditing.world.greet(decode)
    assert auditing.audit().workers[1].unknown == ()


def test_an_attempt_that_nobody_wants_is_found_at_once() -> None:
    auditing = Auditing()
    auditing.decode.reserve(KEY, num_blocks=1)
    [violation] = check_invariants(auditing.audit())
    assert (violation.invariant, violation.where) == ("I2", "decode-0")
    assert str(KEY) in violation.what


def test_who_does_not_answer_is_listed_with_what_the_server_counts_there() -> None:
    auditing = Auditing(num_decodes=2)
    brought_to(auditing.world, Phase.DECODING)
    survey = auditing.ask()
    silent = next(worker for worker in survey.asked if worker.shares and worker.role is Role.DECODE)
    auditing.world.up[silent].clear()
    auditing.deliver()
    assert not survey.is_complete
    audit = auditing.result(survey)
    [view] = [view for view in audit.workers if view.audit is None]
    assert view.silence == "no answer within 1 s"
    assert len(view.before) == len(view.after) == 1
    assert check_invariants(audit) == []


def test_who_is_lost_meanwhile_is_not_waited_for() -> None:
    auditing = Auditing()
    survey = auditing.ask()
    auditing.world.lose(auditing.decode)
    assert not survey.is_complete
    auditing.deliver()
    assert survey.is_complete
    assert auditing.result(survey).workers[1].silence == "it is dead"


def test_who_is_not_there_is_not_asked() -> None:
    auditing = Auditing(connect=False)
    survey = auditing.ask()
    assert survey.is_complete
    silences = [view.silence for view in auditing.result(survey).workers]
    assert silences == ["it is connecting", "it is connecting"]


def test_answers_of_another_life_or_another_question_are_dropped() -> None:
    auditing = Auditing()
    old = auditing.ask()
    auditing.deliver()
    [(decode, view)] = [(w, v) for w, v in old.answers.items() if w.role is Role.DECODE]
    assert view.audit is not None
    auditing.auditor.close(old)
    late = Audited(old.serial, view.audit)
    auditing.auditor.take(decode, late, auditing.world.now)
    survey = auditing.ask()
    auditing.auditor.take(decode, late, auditing.world.now)
    assert survey.answers == {}
    auditing.world.decode.epoch += 1
    auditing.world.deliver_up(decode)
    auditing.deliver_down(decode)
    assert decode not in survey.answers


def test_there_are_only_so_many_audits_at_once() -> None:
    auditing = Auditing(max_audits=2)
    first = auditing.ask()
    auditing.ask()
    with pytest.raises(RequestError, match="too many audits"):
        auditing.ask()
    auditing.auditor.close(first)
    auditing.auditor.close(first)
    assert auditing.ask().serial == 3

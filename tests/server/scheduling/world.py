"""A scheduler and fake workers without a network, for tests: each frame waits in a queue until the
test delivers it, in any order."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from server.contract.generation import Delta, Failed, Finished
from server.contract.request_events import RequestEnded, RequestEvents
from server.metrics.access_log import write_access_line
from server.scheduling.requests import Requests
from server.scheduling.roster import Roster
from server.scheduling.status import Observer
from server.scheduling.workers import Worker
from simulation.charges import RecordingCharges
from tests.server.tiny_text import tiny_text
from transport.frames import AttemptRow, ServerHeartbeat
from triolet.config import RecoveryConfig
from triolet.ids import LIVES

from .fakes import LINK, FakeDecode, FakePrefill, completion_ids, server_config

if TYPE_CHECKING:
    from collections.abc import Iterable

    from server.contract.generation import CancelReason, Event, GenerationRequest
    from server.scheduling.request import Attempt, Request
    from transport.frames import AnyFrame

TEXT = tiny_text()


class Reader:
    """The client of one request.

    Attributes:
      text: text read so far.
      token_ids: tokens read so far.
      terminals: terminal events received.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.terminals: list[Finished | Failed] = []

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert not self.terminals, "an event came after the terminal one"
            match event:
                case Delta():
                    self.text += event.text
                    self.token_ids += event.token_ids
                case _:
                    self.terminals.append(event)

    @property
    def attempt(self) -> Attempt:
        """The current attempt; there must be one."""
        assert self.request.attempt is not None
        return self.request.attempt

    @property
    def finished(self) -> Finished:
        """The successful end; there must be one."""
        [terminal] = self.terminals
        assert isinstance(terminal, Finished), terminal
        return terminal

    @property
    def failed(self) -> Failed:
        """The failure; there must be one."""
        [terminal] = self.terminals
        assert isinstance(terminal, Failed), terminal
        return terminal


class World:
    """A server's scheduler, its workers and its clock.

    Args:
      num_prefills: prefill workers.
      num_decodes: decode workers.
      connect: greet all workers at once.
      config: changes to the server's config.
    """

    def __init__(
        self, num_prefills: int = 1, num_decodes: int = 1, *, connect: bool = True, **config: object
    ) -> None:
        self.now = 100.0
        self.decodes = [FakeDecode(name=f"decode-{i}") for i in range(num_decodes)]
        self.prefills = [FakePrefill(name=f"prefill-{i}") for i in range(num_prefills)]
        self.of: dict[Worker, FakeDecode | FakePrefill] = {}
        fakes: list[FakeDecode | FakePrefill] = [*self.prefills, *self.decodes]
        for fake in fakes:
            worker = Worker(fake.role, f"mem://{fake.name}", LINK, RecoveryConfig(), self.now)
            self.of[worker] = fake
        self.workers = tuple(self.of)
        self.config = server_config(**config)
        self.roster = Roster(
            self.workers, TEXT.max_model_len, self.config.routing.candidates, random.Random(1)
        )
        self.observer = Observer()
        self.wrongly_charged: list[str] = []
        self.charges = RecordingCharges(self.wrongly_charged.append)
        self.events = RequestEvents()
        self.charges.subscribe_to(self.events)
        self.events.subscribe(RequestEnded, write_access_line)
        self.requests = Requests(
            self.config, self.roster, TEXT, self.observer, self.now, self.events
        )
        self.up: dict[Worker, deque[AnyFrame]] = {w: deque() for w in self.workers}
        self.down: dict[Worker, deque[AnyFrame]] = {w: deque() for w in self.workers}
        self.readers: list[Reader] = []
        if connect:
            self.greet_all()

    def announce(self, fake: FakeDecode | FakePrefill, **changes: int) -> None:
        """Change a worker's values, and announce them with its next heartbeat."""
        for name, value in changes.items():
            setattr(fake, name, value)
        self.beat(self.worker(fake))
        self.deliver()

    def observe(self, observer: Observer) -> None:
        """Replace the observer."""
        requests = self.requests
        for part in (requests, requests._attempts, requests.recovery):
            part._observer = observer
        requests._attempts._observers = observer, Observer()
        self.observer = observer

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]

    def worker(self, fake: FakeDecode | FakePrefill) -> Worker:
        """Return the server's view of a fake."""
        return next(w for w, f in self.of.items() if f is fake)

    def submit(self, request: GenerationRequest) -> Reader:
        [reader] = self.submit_together([request])
        return reader

    def submit_together(self, requests: Iterable[GenerationRequest]) -> list[Reader]:
        """Submit several requests, all or none."""
        readers = [Reader(request) for request in self.requests.submit(requests, self.now)]
        self.readers += readers
        self.collect()
        return readers

    def cancel(self, reader: Reader, reason: CancelReason) -> None:
        """Cancel a client's request."""
        self.requests.cancel([reader.request], reason, self.now)
        self.collect()

    def hear(self, worker: Worker, frame: AnyFrame) -> None:
        """Give the server a worker's frame, ahead of all frames in transit."""
        self.requests.received(worker, frame, self.now)
        self.collect()

    def read(self, reader: Reader) -> None:
        """Let a client take the waiting events."""
        mailbox = reader.request.output
        if mailbox.waiting_since is not None:
            reader.take(mailbox.take(now=9.0))
            self.requests.taken(reader.request)
            self.collect()

    def greet(self, worker: Worker) -> None:
        """Deliver WELCOME and the first heartbeat at once."""
        fake = self.of[worker]
        self.requests.welcomed(worker, fake.welcome(), self.now)
        self.requests.received(worker, fake.heartbeat(), self.now)
        self.collect()

    def greet_all(self) -> None:
        for worker in self.workers:
            self.greet(worker)

    def restart(self, worker: Worker) -> None:
        """Lose a worker, and greet its next process."""
        self.lose(worker)
        self.greet(worker)

    def beat(self, worker: Worker) -> None:
        """Exchange heartbeats both ways."""
        if worker.is_connected:
            rows = tuple(AttemptRow(*key) for key in worker.live_keys)
            self.up[worker].append(ServerHeartbeat(1, rows))
        self.down[worker].append(self.of[worker].heartbeat())

    def deliver_up(self, worker: Worker) -> bool:
        """Deliver one frame to a worker; return False if there is none."""
        if not self.up[worker]:
            return False
        self.down[worker].extend(self.of[worker].take(self.up[worker].popleft()))
        return True

    def deliver_down(self, worker: Worker) -> bool:
        """Deliver one frame to the server; return False if there is none."""
        if not self.down[worker]:
            return False
        self.requests.received(worker, self.down[worker].popleft(), self.now)
        self.collect()
        return True

    def compute(self, worker: Worker) -> bool:
        """Let a worker do one step; return whether it had work."""
        fake = self.of[worker]
        frames = fake.step() if isinstance(fake, FakeDecode) else fake.step(self.decodes)
        self.down[worker].extend(frames)
        return bool(frames)

    def crash(self, worker: Worker) -> None:
        """Kill a worker with all frames in transit; its next process is another peer."""
        old = self.of[worker]
        fresh: FakeDecode | FakePrefill
        if isinstance(old, FakeDecode):
            fresh = FakeDecode(
                name=old.name, epoch=old.epoch + LIVES, end_at=old.end_at, labels=old.labels
            )
            self.decodes[self.decodes.index(old)] = fresh
        else:
            fresh = FakePrefill(
                name=old.name, epoch=old.epoch + LIVES, end_at=old.end_at, labels=old.labels
            )
            self.prefills[self.prefills.index(old)] = fresh
        self.of[worker] = fresh
        self.up[worker].clear()
        self.down[worker].clear()

    def lose(self, worker: Worker, cause: str = "link_gone") -> None:
        """Crash a worker, and let the server notice."""
        self.crash(worker)
        self.requests.lost(worker, cause, self.now)
        self.collect()

    def sweep(self, seconds: float = 0.0) -> None:
        """Advance time while all workers send heartbeats."""
        self.now += seconds
        for worker in self.workers:
            worker.monitor.heard(self.now)
        self.requests.sweep(self.now)
        self.collect()

    def settle(self, *, read: bool = True, max_rounds: int = 10_000) -> None:
        """Run everything until nothing changes."""
        for _ in range(max_rounds):
            moved = False
            for worker in self.workers:
                while self.deliver_up(worker):
                    moved = True
                while self.deliver_down(worker):
                    moved = True
                moved |= self.compute(worker)
            for reader in self.readers if read else []:
                moved |= reader.request.output.waiting_since is not None
                self.read(reader)
            if not moved:
                return
        raise AssertionError("the world never settles")

    def complete(self, reader: Reader, num_tokens: int) -> None:
        """Run everything, and assert that a client has read the whole completion and that nothing
        is left."""
        self.end()
        assert reader.token_ids == completion_ids(0, num_tokens)

    def end(self) -> None:
        """Run everything, and assert that nothing is left."""
        self.settle()
        self.check_idle()

    def deliver(self) -> None:
        """Deliver all frames, without computing or reading."""
        while any(self.deliver_up(w) or self.deliver_down(w) for w in self.workers):
            pass

    def check_idle(self) -> None:
        """Assert that nothing is left of any request, here or on the workers."""
        assert self.requests.num_in_flight == 0
        assert self.requests.num_queued == 0
        for queue in self.requests.queues:
            assert (len(queue), queue.num_running, queue.num_tenants) == (0, 0, 0)
        for worker, fake in self.of.items():
            assert not worker.shares
            if isinstance(fake, FakeDecode):
                assert fake.free_blocks == fake.num_blocks
            else:
                assert not fake.waiting
                assert not fake.inputs
        self.check_accounting()

    def check_accounting(self) -> None:
        """Assert that every request has or will have exactly one terminal event and is charged with
        it."""
        self.requests.table.accounting.check(self.requests.num_in_flight)
        live = self.requests.table
        self.charges.check(one.spec.request_id for one in live)
        assert self.wrongly_charged == []
        for reader in self.readers:
            if reader.terminals:
                charge = self.charges.of[reader.request.spec.request_id]
                assert charge.usage == reader.terminals[0].usage

    def collect(self) -> None:
        """Put the scheduler's outgoing frames in transit."""
        outbox = self.requests.outbox
        for worker, frame in outbox.drain_frames() + outbox.drain_credit():
            self.up[worker].append(frame)

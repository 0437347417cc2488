"""What the queue says is ahead of somebody, and what it counts for that."""

from __future__ import annotations

from server.fleet.fair_queue import FairQueue
from triolet.service_class import Claim, ServiceClass

from .test_fair_queue import CONFIG, place


def test_who_waits_by_its_own_limit_is_ahead_of_nobody_but_itself() -> None:
    queue: FairQueue[str] = FairQueue(CONFIG)
    full = Claim("full", max_running=1, service_class=ServiceClass.CRITICAL)
    for number in range(5):
        queue.add(f"full {number}", place(full, 100))
    line = queue.lines[ServiceClass.CRITICAL]
    assert line.ready_tokens == 500
    queue.take("full 0")
    assert queue.first() is None
    assert (line.prompt_tokens, line.ready_tokens) == (400, 0)
    assert queue.tokens_ahead(Claim("other"), 0, 9.0) == 0
    assert queue.tokens_ahead(Claim("full", max_running=1), 0, 9.0) == 400
    queue.end("full 0", 5)
    assert line.ready_tokens == 400

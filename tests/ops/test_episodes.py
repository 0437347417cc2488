"""Tests of summarizing log lines about workers that are lost and come back."""

from __future__ import annotations

from typing import Any

from ops.episodes import Episodes

WORKER = "decode-0@d1435dae48ca8ee6"
AGAIN = "this worker stood still for longer than its leases: send HELLO again"


class Terminal:
    """Records shown lines with their times."""

    def __init__(self) -> None:
        self.episodes = Episodes(hold_s=5.0)
        self.shown: list[tuple[float, str]] = []

    def log(self, now: float, process: str, event: str, **entry: Any) -> None:  # noqa: ANN401
        self.wait(now)
        entry = {"event": event, "level": "warning", "worker": WORKER} | entry
        is_held, told = self.episodes.take(process, entry, f"at {now:g}", now)
        if told is not None:
            self.shown.append((now, told))
        if not is_held:
            self.shown.append((now, event))

    def wait(self, until: float) -> None:
        """Show lines that become due."""
        while (now := self.episodes.due_at) <= until:
            self.shown += [(now, line) for line in self.episodes.due(now)]


def test_a_loss_and_its_end_are_one_line_with_the_number_of_requests() -> None:
    one = Terminal()
    one.log(0.0, "server", "worker_lost", cause="silent", requests=2)
    one.log(0.1, "decode-0", "fenced")
    one.log(0.2, "server", "worker_refused", level="error", reason=AGAIN)
    one.log(0.3, "server", "worker_joined", away_s=1.8)
    one.wait(100.0)
    told = "decode-0 was silent for 1.8 s and is back; 2 requests were affected"
    assert one.shown == [(0.3, told)]


def test_a_worker_that_does_not_come_back_is_told_and_its_return_too() -> None:
    one = Terminal()
    one.log(0.0, "server", "worker_lost", cause="silent", requests=1)
    for now in range(4):
        one.log(float(now), "server", "worker_refused", level="error", reason=AGAIN)
    one.wait(30.0)
    one.log(35.0, "server", "worker_joined", away_s=36.5)
    one.wait(100.0)
    since = "decode-0 has been silent since at 0; 1 request was affected; it refused 4 frames"
    assert one.shown == [
        (5.0, since),
        (35.0, "decode-0 is back after 36.5 s; 1 request was affected"),
    ]
    one.log(101.0, "server", "worker_lost", cause="link_gone")
    one.log(101.5, "server", "worker_joined", away_s=0.5)
    assert one.shown[2:] == [
        (101.5, "decode-0 accepts requests again after 0.5 s (link_gone); 0 requests were affected")
    ]


def test_a_worker_is_back_when_each_server_that_lost_it_has_it_again() -> None:
    one = Terminal()
    one.log(0.0, "server-0", "worker_lost", cause="silent", requests=1)
    one.log(0.0, "server-1", "worker_lost", cause="silent", requests=2)
    one.log(0.2, "server-1", "worker_joined", away_s=1.7)
    assert one.shown == []
    one.log(0.3, "server-0", "worker_joined", away_s=1.8)
    told = "decode-0 was silent for 1.8 s and is back; 3 requests were affected"
    assert one.shown == [(0.3, told)]


def test_what_a_server_has_lost_that_ended_is_forgotten() -> None:
    one = Terminal()
    one.log(0.0, "server", "worker_lost", cause="silent")
    one.episodes.ended("server")
    one.wait(100.0)
    assert one.shown == []


def test_a_standstill_that_no_server_noticed_is_told_in_the_end() -> None:
    one = Terminal()
    one.log(0.0, "decode-0", "process_paused", worker="decode-0", seconds=1.25)
    one.log(0.5, "decode-0", "process_paused", worker="decode-0", seconds=1.0)
    one.log(1.0, "decode-0", "fenced", worker="decode-0")
    one.wait(100.0)
    [(now, line)] = one.shown
    assert now == 5.0
    assert line.startswith("decode-0 paused for 2.2 s and dropped its leases")


def test_one_refusal_is_shown_and_its_repetitions_are_counted() -> None:
    one = Terminal()
    for now in range(7):
        one.log(now / 10, "server", "worker_refused", level="error", reason="another model")
    one.wait(5.0)
    assert one.shown == [
        (0.0, "worker_refused"),
        (5.0, "decode-0 was refused 6 more times: another model"),
    ]
    one.wait(100.0)
    one.log(101.0, "server", "worker_refused", level="error", reason="another model")
    assert one.shown[2:] == [(101.0, "worker_refused")]


def test_a_drained_worker_and_all_else_are_shown_as_they_are() -> None:
    one = Terminal()
    one.log(0.0, "server", "worker_lost", level="info", cause="farewell")
    one.log(0.1, "server", "worker_joined", level="info")
    one.log(0.2, "server", "request_failed", level="error")
    one.log(0.3, "decode-0", "server_gone")
    assert [event for _, event in one.shown] == [
        *("worker_lost", "worker_joined", "request_failed", "server_gone")
    ]

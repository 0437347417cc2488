"""Tests that only a few requests start per turn of the event loop, in turn by sender, and that
liveness probes do not wait."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from server.metrics.metrics import Metrics
from tests.server.support.surface import PATIENCE_S, request_bytes, surface

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.server.support.surface import Surface

CROWD = 60
MOST_IN_A_TURN = 10
"""One turn starts two, and the later turns they need vary by a few: requests of several turns may
be refused in one."""
REFUSED = request_bytes(
    "POST",
    "/v1/chat/completions",
    body=json.dumps({"messages": [{"role": "user", "content": "hi"}], "model": "none"}).encode(),
)
LIVE = request_bytes("GET", "/health/live")


class Turns(trio.abc.Instrument):
    """Records at the end of each turn what has been answered.

    Attributes:
      seen: (refused requests, live probes) per turn.
    """

    def __init__(self, server: Surface) -> None:
        assert isinstance(server.services.metrics, Metrics)
        self._http = server.services.metrics.http
        self.seen = [self.counts]

    @property
    def counts(self) -> tuple[float, float]:
        """Numbers of refused requests and live probes."""
        refused = sum(s.value for f in self._http._errors.collect() for s in f.samples)
        requests = [s for f in self._http._requests.collect() for s in f.samples]
        lives = sum(s.value for s in requests if s.labels["endpoint"] == "GET /health/live")
        return refused, lives

    @property
    def most(self) -> float:
        """Most refused requests in one turn."""
        pairs = zip(self.seen, self.seen[1:], strict=False)
        return max(after[0] - before[0] for before, after in pairs)

    def before_io_wait(self, timeout: float) -> None:
        self.seen.append(self.counts)


async def crowd_of(server: Surface, number: int, stack: ExitStack) -> list[socket.socket]:
    """Open connections that can send without letting the event loop run."""
    address = ("127.0.0.1", server.port)
    crowd = [stack.enter_context(socket.create_connection(address)) for _ in range(number)]
    await until(lambda: server.edge.connections == number)
    return crowd


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(PATIENCE_S):
        while not condition():
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("is_body_late", [False, True])
async def test_a_probe_of_liveness_is_answered_before_a_crowd(is_body_late: bool) -> None:
    async with surface() as server:
        with ExitStack() as stack:
            *crowd, prober = await crowd_of(server, CROWD + 1, stack)
            rest = REFUSED
            if is_body_late:
                for one in crowd:
                    one.sendall(REFUSED[:-1])
                for _ in range(10 * CROWD):  # enough turns to read everything
                    await trio.lowlevel.checkpoint()
                rest = REFUSED[-1:]
            turns = Turns(server)
            trio.lowlevel.add_instrument(turns)
            for one in crowd:
                one.sendall(rest)
            prober.sendall(LIVE)
            await until(lambda: turns.counts == (CROWD, 1))
            trio.lowlevel.remove_instrument(turns)
    refused_before_live = next(refused for refused, lives in turns.seen if lives)
    assert refused_before_live < CROWD / 2
    assert turns.most <= MOST_IN_A_TURN


async def test_requests_that_come_behind_others_have_turns_of_their_own() -> None:
    async with surface() as server:
        with ExitStack() as stack:
            crowd = await crowd_of(server, CROWD, stack)
            turns = Turns(server)
            trio.lowlevel.add_instrument(turns)
            for one in crowd:
                one.sendall(2 * REFUSED)
            await until(lambda: turns.counts == (2 * CROWD, 0))
            trio.lowlevel.remove_instrument(turns)
    assert turns.most <= MOST_IN_A_TURN


def with_key(key: str) -> bytes:
    """Return the refused request with a key."""
    return REFUSED.replace(b"\r\n\r\n", f"\r\nAuthorization: Bearer {key}\r\n\r\n".encode(), 1)


def is_answered(client: socket.socket) -> bool:
    with suppress(BlockingIOError):
        return bool(client.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


async def test_a_request_does_not_wait_for_those_of_a_crowd_with_another_key() -> None:
    async with surface() as server:
        with ExitStack() as stack:
            *crowd, other = await crowd_of(server, CROWD + 1, stack)
            turns = Turns(server)
            for one in crowd:
                one.sendall(with_key("crowd"))
            await until(lambda: turns.counts[0] > 0)  # so the others wait
            other.sendall(with_key("other"))
            await until(lambda: is_answered(other))
            assert turns.counts[0] < CROWD / 2
            await until(lambda: turns.counts[0] == CROWD + 1)


async def test_a_client_that_leaves_while_its_request_waits_is_in_nobody_s_way() -> None:
    async with surface() as server:
        with ExitStack() as stack:
            crowd = await crowd_of(server, CROWD, stack)
            for one in crowd:
                one.sendall(REFUSED)
                one.close()
            await server.all_connections_closed()
        assert (await server.request("GET", "/version")).status == 200

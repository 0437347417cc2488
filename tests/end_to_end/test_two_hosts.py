"""Tests of two hosts that share idempotency keys, limits and the folder of batches, while their
servers are killed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from .fleet_process import PATIENCE_S, wait_until
from .tenants import headers_of
from .two_hosts import (
    ALICE,
    BODY,
    NUM_TOKENS,
    PATH,
    STREAM,
    Hosts,
    events_of,
    running_hosts,
    usage_told,
    wait_restarted,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

KILLS, KILLS_WHOLE = 3, 20
NUM_LINES, NUM_LINES_WHOLE = 6, 200


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    batches = {"server.batches.directory": folder / "jobs", "server.batches.concurrency": 1}
    with running_hosts(folder, batches) as running:
        yield running


def asked(
    fleet: FleetProcess, key: str, body: dict[str, Any] = STREAM, **headers: str
) -> httpx2.Response:
    """Send a request with a key; retry while the answer's server is not yet known to be dead."""
    answer = httpx2.Response(503)
    sent = headers_of(ALICE) | {"idempotency-key": key} | headers

    def is_answered() -> bool:
        nonlocal answer
        answer = httpx2.post(f"{fleet.url}{PATH}", json=body, headers=sent, timeout=PATIENCE_S)
        return answer.status_code != 503

    wait_until(is_answered, PATIENCE_S, "an answer")
    return answer


def read_some(fleet: FleetProcess, key: str, num_events: int, victim: int | None = None) -> int:
    """Read the first events of a stream; then close it, or kill its server and read until the
    stream breaks.

    Returns:
      The id of the last event.
    """
    sent = headers_of(ALICE) | {"idempotency-key": key}
    last = -1
    with httpx2.stream(
        "POST", f"{fleet.url}{PATH}", json=STREAM, headers=sent, timeout=PATIENCE_S
    ) as answer:
        assert answer.status_code == 200
        with suppress(httpx2.TransportError):
            for line in answer.iter_lines():
                assert "[DONE]" not in line, "it lasts longer than this"
                if line.startswith("id: "):
                    last = int(line.removeprefix("id: "))
                if last + 1 == num_events and victim is None:
                    break
                if last + 1 == num_events and victim is not None:
                    # An event has several lines, so this may be the second time.
                    with suppress(ProcessLookupError):
                        os.kill(victim, signal.SIGKILL)
    return last


def test_a_request_is_answered_once_whichever_host_gets_it(hosts: Hosts) -> None:
    before = hosts.tokens()
    answers = [asked(fleet, "joined", BODY) for fleet in (*hosts.fleets, *hosts.fleets)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert hosts.tokens() - before == answers[0].json()["usage"]["total_tokens"]


def test_a_cut_stream_continues_at_the_other_host(hosts: Hosts) -> None:
    before, (first, second) = hosts.tokens(), hosts.fleets
    last = read_some(first, "cut", 5)
    rest = asked(second, "cut", **{"last-event-id": f"{last}"})
    whole = asked(second, "cut")
    assert events_of(rest.text) == events_of(whole.text)[5:]
    assert hosts.tokens() - before == usage_told(whole.text)


@pytest.mark.long
def test_the_answer_of_a_killed_server_is_computed_once_more_and_charged_once(
    hosts: Hosts, whole: bool
) -> None:
    random = Random(7)
    for number in range(KILLS_WHOLE if whole else KILLS):
        before, key = hosts.tokens(), f"killed-{number}"
        owner, other = random.sample(hosts.fleets, 2)
        [victim] = owner.pids("server")
        last = read_some(owner, key, random.randint(1, NUM_TOKENS - 4), victim)
        lost = asked(other, key, **{"last-event-id": f"{last}"})
        assert (lost.status_code, lost.json()["error"]["code"]) == (410, "answer_lost")
        again = asked(other, key)
        assert again.status_code == 200
        wait_restarted(owner, victim)
        for fleet in (owner, other):
            joined = asked(fleet, key)
            assert joined.headers["idempotency-replayed"] == "true"
            assert joined.content == again.content
        assert hosts.tokens() - before == usage_told(again.text)


def create_batch(fleet: FleetProcess, lines: list[dict[str, Any]]) -> str:
    """Upload lines and start their batch; return its id."""
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    stored = fleet.client.post(
        "/v1/files",
        files={"file": ("input.jsonl", content)},
        data={"purpose": "batch"},
        headers=headers_of(ALICE),
    ).raise_for_status()
    asked_for = {"endpoint": lines[0]["url"], "completion_window": "24h"}
    batch = fleet.client.post(
        "/v1/batches",
        json=asked_for | {"input_file_id": stored.json()["id"]},
        headers=headers_of(ALICE),
    ).raise_for_status()
    return str(batch.json()["id"])


def lines_of(fleet: FleetProcess) -> float:
    """Return the lines that the fleet's server has completed."""
    return fleet.metric("triolet_batch_lines_total", outcome="completed")


def kill_runner(hosts: Hosts) -> None:
    """Kill the server that runs the batch after it has charged a line and before it stores the
    line. Wait until the other server has completed a line."""
    hosts.hold.touch()
    wait_until(lambda: hosts.hold.read_text().endswith("\n"), PATIENCE_S, "a line is charged")
    victim = int(hosts.hold.read_text())
    is_first = victim in hosts.fleets[0].pids("server")
    runner, other = hosts.fleets if is_first else reversed(hosts.fleets)
    count = lines_of(other)
    # Kill its supervisor too, so that only the other server can continue.
    runner.process.send_signal(signal.SIGSTOP)
    try:
        os.kill(victim, signal.SIGKILL)
        hosts.hold.unlink()
        wait_until(lambda: lines_of(other) > count, PATIENCE_S, "the other one continues")
    finally:
        runner.process.send_signal(signal.SIGCONT)
    wait_restarted(runner, victim)


@pytest.mark.long
@pytest.mark.timeout(900)  # --whole: a kill every 16 s
def test_a_batch_continues_on_the_other_host_and_each_line_is_charged_once(
    hosts: Hosts, whole: bool
) -> None:
    before, num_lines = hosts.tokens(), NUM_LINES_WHOLE if whole else NUM_LINES
    (first, second), headers = hosts.fleets, headers_of(ALICE)
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": PATH, "body": BODY | {"seed": n}}
        for n in range(num_lines)
    ]
    batch_id = create_batch(first, lines)
    found: dict[str, Any] = {}

    def seen(fleet: FleetProcess) -> dict[str, Any]:
        answer = fleet.client.get(f"/v1/batches/{batch_id}", headers=headers)
        found.update(answer.raise_for_status().json())
        return found

    kills = KILLS_WHOLE if whole else 1
    for number in range(1, kills + 1):
        wanted = number * num_lines // (kills + 2)
        wait_until(
            lambda: seen(second)["request_counts"]["completed"] >= wanted,  # noqa: B023
            PATIENCE_S,
            f"{wanted} lines",
        )
        kill_runner(hosts)
    wait_until(lambda: seen(first)["status"] == "completed", 3 * PATIENCE_S, "the batch ends")
    assert found["request_counts"] == {"total": num_lines, "completed": num_lines, "failed": 0}
    results = second.client.get(f"/v1/files/{found['output_file_id']}/content", headers=headers)
    answers = [json.loads(line) for line in results.text.splitlines()]
    assert [answer["custom_id"] for answer in answers] == [line["custom_id"] for line in lines]
    told = sum(answer["response"]["body"]["usage"]["total_tokens"] for answer in answers)
    assert hosts.tokens() - before == told

"""Tests of two hosts that share idempotency keys, limits and the folder of batches, while their
servers are killed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest

from tests.server.tenants.redis_server import running_redis

from . import paced
from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, wait_until
from .tenants import MODEL, NAMED, OPERATOR, headers_of, key_of, usage_of, write_tenants

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

KILLS, KILLS_WHOLE = 3, 20
NUM_TOKENS, NUM_LINES, NUM_LINES_WHOLE = 24, 6, 200
ALICE: Final = "alice"
LEASE_S: Final = 2.0
"""Of reservations; no server stands still for so long unless the machine does."""
PATH: Final = "/v1/completions"
BODY: Final[dict[str, Any]] = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 1,
}
STREAM: Final = BODY | {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Hosts:
    """Two fleets on two addresses.

    Attributes:
      fleets: see above.
      hold: the file that holds lines; see `paced.HOLD`.
    """

    fleets: tuple[FleetProcess, FleetProcess]
    hold: Path

    def tokens(self) -> int:
        """Return alice's tokens, once no request of hers is reserved."""
        usage: dict[str, Any] = {}

        def is_settled() -> bool:
            usage.update(usage_of(self.fleets[1], ALICE))
            return bool(usage["in_flight"] == 0)

        wait_until(is_settled, PATIENCE_S, "nothing is reserved")
        tokens: int = usage["this_month"]["tokens"]
        return tokens


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    hold = folder / "hold"
    tenants = write_tenants(folder / "tenants.toml", {ALICE: ""})
    secret = folder / "secret"
    secret.write_text("a secret of two hosts, thirty-two long")
    secret.chmod(0o600)
    with running_redis(folder) as redis, pytest.MonkeyPatch.context() as patch:
        patch.setenv(paced.HOLD, str(hold))
        (folder / "limits.url").write_text(redis.url)
        settings = {
            "server.hosts.secret_file": secret,
            "server.hosts.timeout_s": 10,
            "server.tenants.quotas.lease_s": LEASE_S,
            "server.tenants.quotas.call_timeout_s": 10,
            "server.batches.concurrency": 1,
        }
        options = [*WATCHED, *PATIENT, *NAMED, "--tenants", str(tenants)]
        options += ["--limits", f"@{folder / 'limits.url'}", "--batch-dir", str(folder / "jobs")]
        for name, value in settings.items():
            options += ["--set", f"{name}={value}"]
        fleets: list[FleetProcess] = []
        try:
            for number, name in enumerate("ab", 1):
                fleet = FleetProcess(
                    folder / f"{name}.log",
                    *options,
                    key=key_of(OPERATOR),
                    command=paced.COMMAND,
                    host=f"127.0.0.{number}",
                    url_setting="server.hosts.advertised_url",
                )
                fleets.append(fleet)
            for fleet in fleets:
                fleet.wait_ready()
            yield Hosts((fleets[0], fleets[1]), hold)
            for fleet in fleets:
                fleet.wait_at_rest()
        finally:
            for fleet in fleets:
                fleet.stop()


def asked(
    fleet: FleetProcess, key: str, body: dict[str, Any] = STREAM, **headers: str
) -> httpx2.Response:
    """Send a request with a key; wait while its answer's server is not known to be dead."""
    answer = httpx2.Response(503)
    sent = headers_of(ALICE) | {"idempotency-key": key} | headers

    def is_answered() -> bool:
        nonlocal answer
        answer = httpx2.post(f"{fleet.url}{PATH}", json=body, headers=sent, timeout=PATIENCE_S)
        return answer.status_code != 503

    wait_until(is_answered, PATIENCE_S, "an answer")
    return answer


def read_some(fleet: FleetProcess, key: str, num_events: int, victim: int | None = None) -> int:
    """Read the first events of a stream, and close it, or kill its server and read until it breaks.

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


def wait_restarted(fleet: FleetProcess, victim: int) -> None:
    """Wait until a fleet serves again after its server was killed."""
    wait_until(lambda: fleet.pids("server") not in ([], [victim]), PATIENCE_S, "it is back")
    fleet.wait_ready()


def events_of(text: str) -> list[str]:
    return [event for event in text.split("\n\n") if event and not event.startswith(":")]


def usage_told(text: str) -> int:
    """Return the tokens that a whole stream told."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if '"usage"' in line]
    [told] = [usage["total_tokens"] for line in lines if (usage := json.loads(line)["usage"])]
    assert text.endswith("data: [DONE]\n\n")
    return int(told)


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
    """Kill the server that runs the batch when it has charged a line but has not stored it, and
    wait until the other one has completed a line."""
    hosts.hold.touch()
    wait_until(lambda: hosts.hold.read_text().endswith("\n"), PATIENCE_S, "a line is charged")
    victim = int(hosts.hold.read_text())
    is_first = victim in hosts.fleets[0].pids("server")
    runner, other = hosts.fleets if is_first else reversed(hosts.fleets)
    count = lines_of(other)
    # Without its supervisor it is not restarted, so that only the other one can continue.
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

"""Tests of losing one of three zones under load: all its processes are killed, or stopped for
longer than leases last. `--whole -s` prints the table of docs/operations/zones.md."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx2
import pytest

from tests.server.tenants.redis_server import running_redis

from . import paced
from .fleet_process import PATIENCE_S, wait_until
from .tenants import headers_of, write_tenants
from .zone_processes import Zones, started

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

HOSTS: Final = {"a": "127.0.0.1", "b": "127.0.0.2", "c": "127.0.0.3"}
LOST: Final = "b"
ALICE: Final = "alice"
NUM_TOKENS: Final = 40
"""Two seconds of a stream."""
CLIENTS, CLIENTS_WHOLE = 2, 8
"""Clients per zone; each sends one request after another."""
ROUNDS, ROUNDS_WHOLE = 3, 15
"""Requests of each client."""
SOME_TOKENS: Final = 4
STOPPED_S: Final = 5.0
"""Longer than `link.lease_ttl_s`, so that the other zones treat this zone as dead; `--whole` stops
it for half a minute."""
KILL_AFTER, KILL_AFTER_WHOLE = 1, 4
"""Answers of the lost zone before it is killed."""
BODY: Final[dict[str, Any]] = {
    "prompt": "Once upon a time",
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
}


@dataclass
class Load:
    """What the clients saw.

    Attributes:
      began: start of the load.
      texts: complete answers by seed and zone of the server, in order of their end.
      tokens: tokens reported by complete answers.
      cut: answers that were cut off, by zone of the server, with the tokens received.
      seconds: counts by second and kind: answers, tokens, cut off, refused.
      streaming: tokens that running streams have, by zone and key.
      longest_gap_s: longest time without a token in a stream of a surviving server.
    """

    began: float = field(default_factory=time.monotonic)
    texts: list[tuple[int, str, str]] = field(default_factory=list)
    tokens: int = 0
    cut: list[tuple[str, int]] = field(default_factory=list)
    seconds: Counter[tuple[int, str]] = field(default_factory=Counter)
    streaming: dict[tuple[str, str], int] = field(default_factory=dict)
    longest_gap_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, kind: str, number: int = 1) -> None:
        """Count something in the current second."""
        with self._lock:
            self.seconds[int(time.monotonic() - self.began), kind] += number

    def ask(self, url: str, zone: str, seed: int, key: str) -> bool:
        """Request one answer; return whether it was complete."""
        headers = headers_of(ALICE) | {"idempotency-key": key}
        text, num_tokens, told, last = "", 0, 0, time.monotonic()
        try:
            with httpx2.stream(
                "POST",
                f"{url}/v1/completions",
                json=BODY | {"seed": seed},
                headers=headers,
                timeout=PATIENCE_S,
            ) as answer:
                if answer.status_code != 200:
                    self.count(f"refused {answer.status_code}")
                    return False
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, f"a stream of {zone} failed: {chunk}"
                    told = (chunk["usage"] or {}).get("total_tokens", told)
                    for choice in chunk["choices"]:
                        text += choice["text"]
                        num_tokens += 1
                        self.streaming[zone, key] = num_tokens
                        self.count("tokens")
                    if zone != LOST:
                        self.longest_gap_s = max(self.longest_gap_s, time.monotonic() - last)
                    last = time.monotonic()
        except httpx2.TransportError:
            self.count("cut off" if num_tokens else "not connected")
            if num_tokens:
                self.cut.append((zone, num_tokens))
            return False
        finally:
            self.streaming.pop((zone, key), None)
        assert told, f"a stream of {zone} ended early"
        self.count("answers")
        with self._lock:
            self.texts.append((seed, zone, text))
            self.tokens += told
        return True


def run_client(load: Load, zones: Zones, home: str, number: int, rounds: int) -> None:
    """Send one request after another to the home zone; retry elsewhere with the same key."""
    others = [zone for zone in HOSTS if zone != home]
    for round_number in range(rounds):
        key = f"{home}-{number}-{round_number}"
        deadline = time.monotonic() + PATIENCE_S
        tries = 0
        while True:
            places = [home, *others] if home == LOST else [home]
            zone = places[tries % len(places)]
            if load.ask(zones.urls[zone], zone, round_number, key):
                break
            tries += 1
            assert time.monotonic() < deadline, f"{key} was not answered"
            time.sleep(0.2)


def tokens_charged(zones: Zones) -> int:
    """Return the tenant's tokens, once none of its requests is reserved."""
    usage: dict[str, Any] = {}

    def is_settled() -> bool:
        url = f"{zones.urls['a']}/v1/usage"
        usage.update(httpx2.get(url, headers=headers_of(ALICE)).raise_for_status().json())
        return bool(usage["in_flight"] == 0)

    wait_until(is_settled, PATIENCE_S, "nothing is reserved")
    return int(usage["this_month"]["tokens"])


def secret_in(folder: Path) -> Path:
    """Write the hosts' secret to a file and return its path."""
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_text("a secret of three hosts, at least thirty-two")
    return secret


def lose(zones: Zones, stopped_s: float) -> None:
    """Stop a zone for this long, or kill it if 0."""
    zones.send(LOST, signal.SIGSTOP if stopped_s else signal.SIGKILL)
    if stopped_s:
        time.sleep(stopped_s)
        zones.send(LOST, signal.SIGCONT)


def table_of(load: Load, killed_at: float) -> str:
    """Return what happened in each second, as a table in Markdown."""
    kinds = sorted({kind for _, kind in load.seconds})
    rows = [["second", *kinds], ["---"] * (len(kinds) + 1)]
    for second in range(max(second for second, _ in load.seconds) + 1):
        rows.append([str(second), *(str(load.seconds[second, kind]) for kind in kinds)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    gap = f"longest gap elsewhere {load.longest_gap_s:.2f} s"
    return "\n".join([f"{LOST} lost after {killed_at:.1f} s; {gap}", *lines, ""])


@pytest.mark.long
@pytest.mark.parametrize(
    "stopped_s", [pytest.param(0.0, id="killed", marks=pytest.mark.promise), STOPPED_S]
)
def test_a_lost_zone_costs_only_streams_of_its_own_server_and_nothing_twice(
    tmp_path_factory: pytest.TempPathFactory, whole: bool, stopped_s: float
) -> None:
    folder = tmp_path_factory.mktemp("loss")
    tenants = write_tenants(folder / "tenants.toml", {ALICE: ""})
    clients, rounds = (CLIENTS_WHOLE, ROUNDS_WHOLE) if whole else (CLIENTS, ROUNDS)
    kill_after = KILL_AFTER_WHOLE if whole else KILL_AFTER
    with running_redis(folder) as redis:
        (folder / "limits.url").write_text(redis.url)

        def of_server(zone: str, url: str) -> dict[str, object]:
            return {
                "server.tenants.file": tenants,
                "server.tenants.quotas.limits": f"@{folder / 'limits.url'}",
                "server.tenants.quotas.lease_s": 2,
                # Longer, because local charges are not shared while a busy machine delays Redis.
                "server.tenants.quotas.call_timeout_s": 1.5,
                "server.hosts.advertised_url": url,
                "server.hosts.secret_file": secret_in(folder),
                "server.stall_timeout_s": PATIENCE_S,
            }

        workers = {"worker.engine.dtype": "float32", "worker.engine.kv_pool_bytes": "64MiB"}
        zones = Zones(folder, HOSTS, {}, of_server, workers, paced.COMMAND)
        with started(zones), ThreadPoolExecutor(len(HOSTS) * clients) as threads:
            load = Load()
            running = [
                threads.submit(run_client, load, zones, home, number, rounds)
                for home in HOSTS
                for number in range(clients)
            ]
            wait_until(
                lambda: sum(zone == LOST for _, zone, _ in load.texts) >= kill_after * clients,
                PATIENCE_S,
                "the zone has answered",
            )
            wait_until(
                lambda: any(
                    zone == LOST and SOME_TOKENS < count < NUM_TOKENS // 2
                    for (zone, _), count in [*load.streaming.items()]
                ),
                PATIENCE_S,
                "an answer of the zone is half done",
            )
            killed_at = time.monotonic() - load.began
            lose(zones, 6 * stopped_s if whole else stopped_s)
            for one in running:
                one.result()
            sys.stdout.write(table_of(load, killed_at))
            charged = tokens_charged(zones)
    assert len(load.texts) == len(HOSTS) * clients * rounds
    cut = set() if stopped_s else {LOST}
    assert {zone for zone, _ in load.cut} == cut, "only streams of a dead server are lost"
    of_seeds: dict[int, set[str]] = {}
    for seed, _, text in load.texts:
        of_seeds.setdefault(seed, set()).add(text)
    assert [len(texts) for texts in of_seeds.values()] == [1] * rounds, "every answer is exact"
    # An answer that was complete when its server died may already have been charged.
    whole_before = sum(num_tokens >= NUM_TOKENS for _, num_tokens in load.cut)
    assert load.tokens <= charged <= load.tokens + whole_before * (charged // len(load.texts) + 1)

"""Test helper that runs a whole fleet with `triolet serve`: start, requests, metrics, audits,
stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import httpx2
from msgspec.structs import replace

from loadtest.campaign.answers import key_headers
from ops.ports import bind_port
from tests import forked
from triolet.audit import FleetAudit
from triolet.invariants import check_at_rest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triolet.audit import ProcessFacts
    from triolet.invariants import Violation

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
PATIENCE_S = 60.0
"""Timeout of things that take a moment on an idle machine."""
COMMAND_TIMEOUT_S = 240.0
"""Timeout of a command, which may start all processes one at a time."""
POLL_S = 0.02
REST_TIMEOUT_S = 60.0
"""Timeout of becoming idle: leases and lost responses expire after 2 s, but machines may be
slow."""
REST_POLL_S = 0.1
"""Interval of audits: workers read their whole pools, which takes 40 ms of a core."""
CACHED_THREADS = 8
"""Tolerated extra threads: Trio keeps threads for ten seconds after their last use."""

METRIC = re.compile(r"^(?P<name>[a-z_:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until `condition` holds; fail with `what` after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"not within {timeout_s} s: {what}"
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


def with_cached_threads(audit: FleetAudit) -> FleetAudit:
    """Return an audit with CACHED_THREADS more threads, as an upper bound for later audits."""

    def more(process: ProcessFacts) -> ProcessFacts:
        return replace(process, threads=(process.threads or 0) + CACHED_THREADS)

    views = [
        replace(view, audit=view.audit and replace(view.audit, process=more(view.audit.process)))
        for view in audit.workers
    ]
    server = replace(audit.server, process=more(audit.server.process))
    return replace(audit, server=server, workers=tuple(views))


class FleetProcess:
    """One `triolet serve` with all its children.

    Args:
      log_path: file for its output.
      options: options of the command.
      key: API key of an operator, if the fleet has tenants.
      command: command that runs `triolet`; None for the installed one.
      host: loopback address to listen on.
      url_setting: setting that gets the fleet's URL; empty for none.
    """

    def __init__(
        self,
        log_path: Path,
        *options: str,
        key: str = "",
        command: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        url_setting: str = "",
    ) -> None:
        self._headers = key_headers(key)
        # Keep it open as long as the fleet runs, so that no other process gets the port.
        self._kept = bind_port(host, 0)
        self.port: int = self._kept.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        if url_setting:
            options += ("--set", f"{url_setting}={self.url}")
        self.log_path = log_path
        self._log: IO[bytes] = log_path.open("wb")
        triolet = command or [forked.TRIOLET]
        self.process = forked.Popen(
            [*triolet, "serve", *options, "--host", host, "--port", str(self.port)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            cwd=ROOT,
        )
        self.client = self._new_client()

    def wait_ready(self) -> None:
        """Wait until the fleet accepts requests; print the log on failure."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log_text()
            with suppress(httpx2.TransportError):
                return self.client.get("/health/ready").status_code == 200
            return False

        try:
            wait_until(is_ready, START_TIMEOUT_S, "fleet is ready")
        except AssertionError:
            sys.stderr.write(self.log_text()[-4000:])
            raise

    def stop(self) -> None:
        """Stop it like Ctrl-C; kill processes that remain, and fail."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise
        finally:
            self._log.close()
            self._kept.close()

    def run_triolet(self, *arguments: str) -> tuple[int, list[str]]:
        """Run a command on this fleet; return its exit code and output lines."""
        command = [forked.TRIOLET, *arguments, "--port", str(self.port)]
        with forked.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
        return process.returncode, output.decode().splitlines()

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def log_events(self, event: str) -> Iterator[dict[str, Any]]:
        """Yield the log lines with one event, of all processes."""
        for line in self.log_text().splitlines():
            if f'"{event}"' in line and line.startswith("{"):
                entry = json.loads(line)
                if entry.get("event") == event:
                    yield entry

    def pids(self, role: str) -> list[int]:
        """Return the pids of running processes of a role, from `ps`."""
        listed = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            check=False,
            capture_output=True,
            text=True,
        ).stdout
        rows = [line.split(None, 1) for line in listed.splitlines()]
        return [int(pid) for pid, args in rows if f"triolet {role}" in args]

    def metrics(self) -> list[Sample]:
        """Return all samples of /metrics."""
        text = self.client.get("/metrics").raise_for_status().text
        return [
            Sample(m["name"], dict(LABEL.findall(m["labels"] or "")), float(m["value"]))
            for m in METRIC.finditer(text)
        ]

    def samples(self, name: str) -> list[Sample]:
        """Return all samples of one name."""
        return [sample for sample in self.metrics() if sample.name == name]

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of all samples with this name and these labels."""
        return sum(
            sample.value
            for sample in self.metrics()
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def kv_blocks(self, pool: str) -> dict[str, float]:
        """Return the number of blocks by state over all workers of a pool."""
        return {
            state: self.metric("triolet_kv_blocks", pool=pool, state=state)
            for state in ("free", "cached", "leased")
        }

    def audit(self) -> FleetAudit:
        """Fetch an audit of the whole fleet, on a separate connection."""
        url = f"{self.url}/fleet/audit"
        answer = httpx2.get(url, timeout=PATIENCE_S, headers=self._headers).raise_for_status()
        return FleetAudit.from_json(answer.content)

    def warm_up(self) -> FleetAudit:
        """Use every link and thread once; return the audit of the idle fleet as a reference."""
        body = {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
        self.client.post("/v1/completions", json=body).raise_for_status()
        return with_cached_threads(self.wait_at_rest())

    def wait_at_rest(
        self, before: FleetAudit | None = None, timeout_s: float = REST_TIMEOUT_S
    ) -> FleetAudit:
        """Close the client, and wait until every invariant holds and no request has left anything.

        Args:
          before: reference audit; processes must not have more files, threads or tasks.
          timeout_s: time after which the test fails.
        """
        self.hang_up()
        give_up = time.monotonic() + timeout_s
        while True:
            audit = self.audit()
            wrong: list[Violation | str] = list(check_at_rest(audit, before))
            if audit.server.connections != 1:
                wrong.append(f"{audit.server.connections} connections, this one included")
            if not wrong:
                return audit
            assert time.monotonic() < give_up, "\n".join(map(str, wrong))
            time.sleep(REST_POLL_S)

    def hang_up(self) -> None:
        """Close the client's keep-alive connections."""
        self.client.close()
        self.client = self._new_client()

    def _new_client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE_S, headers=self._headers)

    def wait_all_blocks_free(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until no block of any pool is leased."""
        wait_until(
            lambda: all(self.kv_blocks(pool)["leased"] == 0 for pool in ("prefill", "decode")),
            timeout_s,
            "all KV blocks are free",
        )


@contextmanager
def running_fleet(
    log_path: Path,
    *options: str,
    at_rest: bool = False,
    key: str = "",
    command: Sequence[str] | None = None,
) -> Iterator[FleetProcess]:
    """Run a fleet and stop it; with `at_rest`, check that it is idle before."""
    fleet = FleetProcess(log_path, *options, key=key, command=command)
    try:
        fleet.wait_ready()
        yield fleet
        if at_rest:
            fleet.wait_at_rest()
    finally:
        fleet.stop()

"""Tests of fleet audits and `doctor --ledger` on a working fleet."""

from __future__ import annotations

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests import forked
from triolet.invariants import check_invariants

from .fleet_process import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

CLIENTS = 3
AUDITS = 6
"""Concurrent audits; fewer than `max_audits`."""


@contextmanager
def at_work(fleet: FleetProcess) -> Iterator[None]:
    """Keep a few streams running."""
    enough = threading.Event()

    def stream(number: int) -> None:
        body = {"prompt": f"Story {number}:", "max_tokens": 900, "ignore_eos": True, "stream": True}
        while not enough.is_set():
            with fleet.client.stream("POST", "/v1/completions", json=body) as answer:
                for _ in answer.iter_lines():
                    if enough.is_set():
                        break

    with ThreadPoolExecutor(CLIENTS) as threads:
        clients = [threads.submit(stream, number) for number in range(CLIENTS)]
        try:
            wait_until(
                lambda: fleet.audit().server.running == CLIENTS, PATIENCE_S, "all streams run"
            )
            yield
        finally:
            enough.set()
        for client in clients:
            client.result(PATIENCE_S)


def test_an_operator_sees_the_leases_of_running_streams(fleet: FleetProcess) -> None:
    command = [forked.TRIOLET, "doctor", "--ledger", fleet.url]
    environment = {**os.environ, "COLUMNS": "200"}
    with (
        at_work(fleet),
        forked.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        out, _ = process.communicate(timeout=PATIENCE_S)
    shown = out.decode()
    assert process.returncode == 0, shown
    assert "All blocks, leases and requests are consistent." in shown
    assert "Leases on decode-" in shown


def test_no_audit_of_a_fleet_at_work_finds_anything_wrong(fleet: FleetProcess) -> None:
    # On a busy machine a worker may be late, but its answers must be correct.
    with at_work(fleet), ThreadPoolExecutor(AUDITS) as threads:
        audits = list(threads.map(lambda _: fleet.audit(), range(5 * AUDITS)))
    for audit in audits:
        assert check_invariants(audit) == []
        me = f"{audit.server.name}@{audit.server.epoch}"
        assert {lease.server for worker in audit.answered for lease in worker.leases} <= {me}
    assert any(lease.num_blocks for a in audits for w in a.answered for lease in w.leases)

"""Fixtures of end-to-end tests: the shared fleet, and a check that it is idle after every test.

After each test, all invariants must hold, all blocks must be free (and still poisoned), and no
process may have more files, threads or tasks than before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from .fleet_process import FleetProcess, running_fleet
from .scripted_model import Rule, command, write_model, write_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from triolet.audit import FleetAudit

STALL_TIMEOUT_S = 4.0
"""Shorter than the default of 10 s, for the test of stalled clients, but longer than a busy machine
may keep other clients from reading."""
WATCHED = (
    *("--set", "worker.engine.poison_freed_blocks=true"),
    *("--kv-pool", "64MiB", "--dtype", "float32"),
)
"""A pool small enough for fast audits, and the dtype of the reference results."""
PATIENT = (
    "--set",
    "link.peer_timeout_s=6",
    "--set",
    "link.progress_timeout_s=6",
    "--set",
    "link.lease_ttl_s=8",
)
"""Long timeouts, so that no process is declared dead: a busy machine may pause a process for longer
than the default of 1.5 s."""

COUNTING = (
    *("--set", "server.grammar.cpu_s=30"),
    *("--set", "server.grammar.walk_cpu_s=30"),
    *("--set", "server.grammar.walk_mask_cpu_s=30"),
)
"""High CPU limits, so that grammars are refused by deterministic limits, not by processor time."""

EAGER = ("--set", "link.heartbeat_interval_s=0.1")
"""Frequent heartbeats for fleets that must become idle after each test: the server's count of free
blocks comes from the last heartbeat, for which each test would wait half a second."""


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """One server, prefill and decode worker with the demo model, for the whole session."""
    log = tmp_path_factory.mktemp("fleet") / "fleet.log"
    stall = ("--set", f"server.stall_timeout_s={STALL_TIMEOUT_S}")
    # Every prompt goes to prefill, however short; test_local_prefill.py tests local prefill.
    # The response cache, for tests that use it.
    kept = ("--set", "server.response_cache.max_bytes=1MiB")
    routed = ("--set", "server.routing.local_prefill=off")
    # The dashboard's charts have points at once.
    sampled = ("--set", "server.sample_s=1")
    options = (*WATCHED, *PATIENT, *COUNTING, *EAGER, *stall, *kept, *routed, *sampled)
    with running_fleet(log, *options) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def first_rest(shared_fleet: FleetProcess) -> FleetAudit:
    """Audit of the shared fleet before the first test."""
    return shared_fleet.warm_up()


@pytest.fixture
def fleet(shared_fleet: FleetProcess, first_rest: FleetAudit) -> Iterator[FleetProcess]:
    """The shared fleet; after the test it must be idle again."""
    yield shared_fleet
    shared_fleet.wait_at_rest(first_rest)


@pytest.fixture
def start_fleet(tmp_path: Path) -> Iterator[Callable[..., FleetProcess]]:
    """Return a function that starts separate fleets, for tests that break them. Fleets that still
    run after the test must become idle."""
    started: list[FleetProcess] = []

    def start(*options: str, key: str = "", command: Sequence[str] | None = None) -> FleetProcess:
        log = tmp_path / f"fleet-{len(started)}.log"
        fleet = FleetProcess(log, *WATCHED, *options, key=key, command=command)
        started.append(fleet)
        fleet.wait_ready()
        return fleet

    yield start
    try:
        for fleet in started:
            if fleet.process.poll() is None:
                fleet.wait_at_rest()
    finally:
        for fleet in started:
            fleet.stop()


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the scripted fleet's model."""
    return write_model(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def scripted_fleet(
    scripted_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FleetProcess]:
    """A fleet with a scripted model, for the whole session. It must be idle afterwards."""
    log = tmp_path_factory.mktemp("scripted-fleet") / "fleet.log"
    options = (
        str(scripted_model),
        "--model-name",
        "scripted",
        "--set",
        "server.routing.local_prefill=off",
    )
    options += (*WATCHED, *PATIENT, *EAGER)
    with running_fleet(log, *options, at_rest=True, command=command(scripted_model)) as fleet:
        yield fleet


@pytest.fixture
def script(scripted_fleet: FleetProcess, scripted_model: Path) -> Callable[..., FleetProcess]:
    """A function that gives the scripted fleet the rules of a test and returns it."""
    return partial(play, scripted_fleet, scripted_model)


def play(fleet: FleetProcess, model: Path, *rules: Rule) -> FleetProcess:
    """Give a fleet the rules of a test and return it."""
    write_script(model, rules)
    return fleet

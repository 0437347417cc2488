"""The fleet that end-to-end tests share, and the rule that every test leaves its fleet at rest.

After each test all invariants must hold, all blocks be free (and as poisoned as when they were
freed), and files, threads and tasks of every process be as few as before.
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
"""Short, so that the test of stalled clients need not wait for the product's 10 s; and longer than
a busy machine keeps a client of the other tests from reading."""
WATCHED = (
    *("--set", "worker.engine.poison_freed_blocks=true"),
    *("--kv-pool", "64MiB", "--dtype", "float32"),
)
"""A pool that an audit looks through in a moment, and the type of the references."""
PATIENT = (
    "--set",
    "link.peer_timeout_s=6",
    "--set",
    "link.progress_timeout_s=6",
    "--set",
    "link.lease_ttl_s=8",
)
"""For fleets in which no process is to be taken for dead: a busy machine lets a process stand still
for longer than the product's 1.5 s, which would then rightly cost its attempts."""

COUNTING = (
    *("--set", "server.grammar.cpu_s=30"),
    *("--set", "server.grammar.walk_cpu_s=30"),
    *("--set", "server.grammar.walk_mask_cpu_s=30"),
)
"""Grammars are refused by what the library counts and not by processor time, which differs from
machine to machine."""

EAGER = ("--set", "link.heartbeat_interval_s=0.1")
"""For fleets that come to rest after each of many tests: at rest the server's count of free blocks
is that of the last heartbeat, for which each test would wait half a second and look five times."""


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """One server, one prefill and one decode worker with the demo model, for the whole session."""
    log = tmp_path_factory.mktemp("fleet") / "fleet.log"
    stall = ("--set", f"server.stall_timeout_s={STALL_TIMEOUT_S}")
    # Every prompt goes all the way, however short; test_local_prefill.py has the short cut.
    # Answers are given again to tests that ask for it.
    kept = ("--set", "server.response_cache.max_bytes=1MiB")
    routed = ("--set", "server.routing.local_prefill=off")
    options = (*WATCHED, *PATIENT, *COUNTING, *EAGER, *stall, *kept, *routed)
    with running_fleet(log, *options) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def first_rest(shared_fleet: FleetProcess) -> FleetAudit:
    """How the shared fleet is before the first test."""
    return shared_fleet.warm_up()


@pytest.fixture
def fleet(shared_fleet: FleetProcess, first_rest: FleetAudit) -> Iterator[FleetProcess]:
    """The shared fleet; after the test it must be as it was."""
    yield shared_fleet
    shared_fleet.wait_at_rest(first_rest)


@pytest.fixture
def start_fleet(tmp_path: Path) -> Iterator[Callable[..., FleetProcess]]:
    """Start fleets of one's own, with options, for tests that break them. Those that are still
    there after the test must come to rest."""
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
    """The directory of the model that the scripted fleet serves."""
    return write_model(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="session")
def scripted_fleet(
    scripted_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FleetProcess]:
    """A fleet whose model says what a script says, for the whole session. After it, and with all
    its clients gone, the fleet must be at rest."""
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
    """What gives the scripted fleet the rules of a test, and returns it."""
    return partial(play, scripted_fleet, scripted_model)


def play(fleet: FleetProcess, model: Path, *rules: Rule) -> FleetProcess:
    """Give a fleet the rules of a test, and return it."""
    write_script(model, rules)
    return fleet

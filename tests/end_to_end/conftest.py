"""The fleet that end-to-end tests share, and the rule that every test leaves it empty."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from .fleet_process import FleetProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

STALL_TIMEOUT_S = 2.0
"""Short, so that the test of stalled clients need not wait for the product's 10 s."""


@pytest.fixture(scope="session")
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    """One server, one prefill and one decode worker with the demo model, for the whole session."""
    log = tmp_path_factory.mktemp("fleet") / "fleet.log"
    fleet = FleetProcess(log, "--stall-timeout", str(STALL_TIMEOUT_S))
    try:
        fleet.wait_ready()
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture
def fleet(shared_fleet: FleetProcess) -> Iterator[FleetProcess]:
    """The shared fleet; after the test every KV block must be free again."""
    yield shared_fleet
    shared_fleet.wait_all_blocks_free()


@pytest.fixture
def start_fleet(tmp_path: Path) -> Iterator[Callable[..., FleetProcess]]:
    """Start fleets of one's own, with options, for tests that break them."""
    started: list[FleetProcess] = []

    def start(*options: str) -> FleetProcess:
        fleet = FleetProcess(tmp_path / f"fleet-{len(started)}.log", *options)
        started.append(fleet)
        fleet.wait_ready()
        return fleet

    yield start
    for fleet in started:
        fleet.stop()

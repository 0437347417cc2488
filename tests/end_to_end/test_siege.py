"""Tests of a fleet under all kinds of attacks: it survives, leaks no blocks and reveals no
secrets."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from loadtest.harness.servers import cost_of
from loadtest.hostile_clients import (
    ATTACKS,
    CANARY,
    SCALED,
    besiege,
    foreign_names,
    large_bodies,
)
from triolet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .fleet_process import FleetProcess

pytestmark = pytest.mark.slow

MAX_GROWTH_BYTES = 64 * MIB
SHARE = 0.1
SHARES: dict[Callable[..., Awaitable[None]], float] = {large_bodies: SHARE, foreign_names: 0.04}
"""Number of attacks: each large body, four at a time, and 400 names that must not become labels."""
SHARES_WHOLE: dict[Callable[..., Awaitable[None]], float] = {
    large_bodies: 1.0,
    foreign_names: SHARE,
}


@pytest.mark.proof
def test_a_fleet_under_siege_lives_and_comes_to_rest(fleet: FleetProcess, whole: bool) -> None:
    """The fixture checks blocks, files, tasks and connections afterwards. The benchmark measures
    latency of harmless clients and the largest crowds, which depend on the machine."""
    (server,) = fleet.pids("server")
    before = cost_of(server)
    series = len(fleet.metrics())
    for attack in ATTACKS:
        share = (SHARES_WHOLE if whole else SHARES).get(attack, SHARE)
        scaled = partial(attack, share=share) if attack in SCALED else attack
        seen = trio.run(besiege, fleet.url, scaled)
        assert not seen.failures, (attack.__name__, seen.failures[:3])
        assert fleet.process.poll() is None
    after = cost_of(server)
    assert before is not None
    assert after is not None, "the server process is another one"
    assert after.rss_bytes - before.rss_bytes < MAX_GROWTH_BYTES
    # Some statuses are counted for the first time; names from clients must not become labels.
    assert len(fleet.metrics()) - series < 60
    fleet.wait_at_rest()
    assert CANARY not in fleet.client.get("/metrics").text
    assert CANARY not in fleet.client.get("/fleet/audit").text
    log = fleet.log_text()
    assert CANARY not in log
    for line in log.splitlines():
        if line.startswith("{"):
            json.loads(line)
        assert "\x1b" not in line
        assert "\u202e" not in line
    answer = fleet.client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
    assert answer.status_code == 200

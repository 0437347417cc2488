"""Tests of two fleets that share limits in Redis: common limits, also after an outage of Redis, and
correct charges when workers crash."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import pytest
import trio

from loadtest.campaign.answers import draw_asks, lengthened
from loadtest.campaign.faults import ask_under_faults
from loadtest.campaign.limits import Taken, take_all
from loadtest.harness.servers import FleetLog
from server.tenants.redis_scripts import PREFIX
from tests.server.tenants.redis_server import RedisServer, running_redis

from .conftest import PATIENT, WATCHED
from .fleet_process import PATIENCE_S, FleetProcess, wait_until
from .tenants import (
    NAMED,
    OPERATOR,
    check_charges,
    key_of,
    usage_of,
    write_tenants,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loadtest.campaign.answers import Ask
    from loadtest.campaign.client import Story
    from loadtest.campaign.faults import Disturbed

pytestmark = pytest.mark.slow

LIMIT: Final = 200.0
"""Tokens per minute."""
MOST_OFF: Final = 0.02
LIMITED: Final = ("alice", "bob", "carol")
PAYING: Final = ("dora", "emil")
ASKS, LONGEST = 12, 120
MOST_RUNS: Final = 5
"""Tries until a kill hits a request: a single kill may come too late."""
UNHURRIED: Final = ("--set", "server.tenants.quotas.call_timeout_s=10")
"""Longer timeout, because a busy machine may pause Redis. A stopped Redis is still noticed."""
TAKE_ALL: Final = (
    "--set",
    "server.overload.admission.is_on=false",
    "--set",
    "server.overload.brownout.is_on=false",
    "--set",
    "server.overload.guard.is_on=false",
)
"""Settings with which only quotas refuse requests."""


@dataclass(frozen=True)
class World:
    """Two fleets (two `triolet serve`) and the Redis that they share."""

    redis: RedisServer
    fleets: tuple[FleetProcess, FleetProcess]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("shared")
    plans = dict.fromkeys(LIMITED, f"tokens_per_minute = {LIMIT}")
    plans |= dict.fromkeys(PAYING, "max_running = 4\nmax_concurrent = 100\nkv_share = 0.9")
    tenants = write_tenants(folder / "tenants.toml", plans)
    with running_redis(folder) as redis:
        options = [*WATCHED, *PATIENT, *TAKE_ALL, *UNHURRIED, *NAMED, "--tenants", str(tenants)]
        place = folder / "limits.url"
        place.write_text(redis.url)
        options += ["--limits", f"@{place}"]
        fleets: list[FleetProcess] = []
        try:
            for name in "ab":
                log = folder / f"fleet-{name}.log"
                fleets.append(FleetProcess(log, *options, key=key_of(OPERATOR)))
            for fleet in fleets:
                fleet.wait_ready()
            yield World(redis, (fleets[0], fleets[1]))
            for fleet in fleets:
                fleet.wait_at_rest()
        finally:
            for fleet in fleets:
                fleet.stop()


def taken_of(world: World, tenant: str) -> Taken:
    """Return a tenant's responses from both servers."""
    return trio.run(take_all, key_of(tenant), [fleet.url for fleet in world.fleets])


def check(taken: Taken, limit: float) -> None:
    """Check that it is what a limit allows, and that refusals name that limit."""
    assert taken.share(limit) == pytest.approx(1, abs=MOST_OFF), taken
    assert taken.shown_limits == {f"{limit:g}"}


def wait_for_log(world: World, event: str, **fields: object) -> None:
    """Wait until the last log event of both servers about their limits is this one."""

    def last(fleet: FleetProcess) -> dict[str, Any]:
        kinds = ("limits_are_local", "limits_are_shared")
        lines = [line for kind in kinds for line in fleet.log_events(kind)]
        return max(lines, key=lambda line: str(line["timestamp"]))

    wanted = {"event": event, **fields}
    wait_until(
        lambda: all(wanted.items() <= last(fleet).items() for fleet in world.fleets),
        PATIENCE_S,
        f"{wanted} in both logs",
    )


def wait_for_limits(world: World, word: str) -> None:
    """Wait until both servers report the scope of their limits in log, metrics and probes."""
    is_up = 1.0 if word == "shared" else 0.0

    def is_said_by(fleet: FleetProcess) -> bool:
        usage_of(fleet, OPERATOR)  # a request detects it sooner than heartbeats
        said: str = fleet.client.get("/health").json()["limits"]
        return said == word

    for fleet in world.fleets:
        wait_until(partial(is_said_by, fleet), PATIENCE_S, f"limits are {word}")
        assert fleet.metric("triolet_quota_store_up") == is_up


def test_one_limit_for_both_and_a_part_for_each_while_redis_is_away(world: World) -> None:
    wait_until(
        lambda: all(fleet.metric("triolet_quota_servers") == 2 for fleet in world.fleets),
        PATIENCE_S,
        "each knows the other",
    )
    wait_for_limits(world, "shared")

    alice = taken_of(world, "alice")
    check(alice, LIMIT)
    wait_for_accounts(world, "alice", alice.tokens)

    world.redis.stop()
    wait_for_limits(world, "local")
    bob = [trio.run(take_all, key_of("bob"), [fleet.url]) for fleet in world.fleets]
    for taken in bob:
        check(taken, LIMIT / 2)
    wait_for_log(world, "limits_are_local", part="1/2")

    world.redis.start()
    wait_for_limits(world, "shared")
    wait_for_log(world, "limits_are_shared", servers=2)
    # Redis' state applies; it does not include what servers charged alone.
    wait_for_accounts(world, "bob", 0)
    for fleet in world.fleets:
        usage = usage_of(fleet, "bob")
        assert usage["is_shared"] is True
        assert usage["remaining"]["tokens"] == LIMIT
        assert usage_of(fleet, "alice")["this_month"]["tokens"] == alice.tokens

    carol = taken_of(world, "carol")
    check(carol, LIMIT)
    wait_for_accounts(world, "carol", carol.tokens)


def wait_for_accounts(world: World, tenant: str, tokens: int) -> None:
    """Wait until both servers report this usage of a tenant, and no running requests."""

    def seen() -> list[tuple[int, int]]:
        accounts = [usage_of(fleet, tenant) for fleet in world.fleets]
        return [(one["this_month"]["tokens"], one["in_flight"]) for one in accounts]

    wait_until(lambda: seen() == [(tokens, 0)] * 2, PATIENCE_S, f"{tenant} has used {tokens}")
    for fleet in world.fleets:
        assert fleet.metric("triolet_quota_reservations") == 0
        assert fleet.metric("triolet_quota_open_sequences") == 0


def test_what_is_charged_is_what_was_told_when_workers_die(world: World) -> None:
    fleet = world.fleets[0]
    stories: list[Story] = []
    for fault in ("decode-kill", "prefill-kill"):
        for run in range(MOST_RUNS):
            hit = fleet.metric("triolet_attempts_failed_total", cause="decode_lost")
            asks = asks_of_both(seed=f"{fault} {run}")
            disturbed = trio.run(ask_while_one_dies, fleet, asks, fault)
            stories += disturbed.stories
            hit = fleet.metric("triolet_attempts_failed_total", cause="decode_lost") - hit
            # Prompts take milliseconds, so a kill of prefill may miss all of them.
            if disturbed.injected and (hit or fault == "prefill-kill"):
                break
        else:
            raise AssertionError(f"{fault} hit no request")
    check_charges(fleet, PAYING, stories)
    other = world.fleets[1]
    assert [usage_of(other, name)["this_month"] for name in PAYING] == [
        usage_of(fleet, name)["this_month"] for name in PAYING
    ]
    assert world.redis.command("KEYS", f"{PREFIX}held:*") == b"*0\r\n"
    for name in PAYING:
        for counter in "nh":
            assert world.redis.command("HGET", f"{PREFIX}t:{name}", counter) == b"$1\r\n0\r\n"


def asks_of_both(seed: str) -> list[Ask]:
    """Return requests of both tenants with answers of different lengths."""
    drawn = draw_asks(ASKS, crc32(seed.encode()))
    return [
        replace(lengthened(ask, LONGEST * (n + 1) // ASKS), key=key_of(PAYING[n % 2]))
        for n, ask in enumerate(drawn)
    ]


async def ask_while_one_dies(fleet: FleetProcess, asks: Sequence[Ask], fault: str) -> Disturbed:
    """Send all requests concurrently; kill a worker after the first few answers."""
    return await ask_under_faults(
        fleet.url,
        FleetLog(fleet.log_path),
        asks,
        len(asks),
        [fault],
        Random(fault),
        retries_broken=False,
        last_moment=0.3,
        max_jitter_s=0.0,
        key=key_of(OPERATOR),
    )

"""Tests of the desired numbers of workers: read from Redis, exported in metrics and at GET
/admin/scale."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest
import trio
from structlog.testing import capture_logs

from server.membership.desired import DesiredWorkers
from tests.server.scheduling.fakes import server_config
from tests.server.support.surface import surface, until
from tests.server.tenants.redis_server import running_redis
from triolet.config.membership import MembershipConfig, RedisMembersConfig, ScaleConfig
from triolet.ids import Place, Role

if TYPE_CHECKING:
    from pathlib import Path

DESIRED: Final = {
    Place("", Role.DECODE, "a"): 3,
    Place("demo", Role.PREFILL, "a"): 0,
    Place("", Role.SERVER): 2,
    Place("another", Role.DECODE): 1,
}
LINES: Final = [
    'triolet_desired_workers{model="demo",role="decode",zone="a"} 3.0',
    'triolet_desired_workers{model="demo",role="prefill",zone="a"} 0.0',
    'triolet_desired_workers{model="demo",role="server",zone=""} 2.0',
    'triolet_observed_workers{model="demo",role="decode",zone="a"} 0.0',
    'triolet_observed_workers{model="demo",role="decode",zone="eu-1a"} 1.0',
    'triolet_observed_workers{model="demo",role="prefill",zone="a"} 0.0',
    'triolet_observed_workers{model="demo",role="prefill",zone="eu-1a"} 1.0',
]


async def test_desired_and_present_workers_are_metrics_of_own_models() -> None:
    async with surface() as server:
        server.services.metrics.desired = lambda: DESIRED
        text = (await server.request("GET", "/metrics")).body.decode()
    starts = ("triolet_desired_workers{", "triolet_observed_workers{")
    found = [line for line in text.splitlines() if line.startswith(starts)]
    assert found == LINES


@pytest.mark.parametrize(
    ("query", "desired", "rows"),
    [
        ("", 5, 5),
        ("?model=demo&role=decode&zone=a", 3, 1),
        ("?role=server", 2, 1),
        ("?role=prefill&zone=a", 0, 1),
        ("?zone=a", 3, 2),
    ],
)
async def test_an_autoscaler_reads_one_number(query: str, desired: int, rows: int) -> None:
    async with surface() as server:
        server.services.metrics.desired = lambda: DESIRED
        answer = (await server.request("GET", f"/admin/scale{query}")).json
    assert (answer["desired"], len(answer["workers"])) == (desired, rows)


@pytest.mark.parametrize("order", [1, -1])
async def test_of_two_numbers_of_one_place_the_named_one_counts(order: int) -> None:
    both = [(Place("", Role.DECODE), 3), (Place("demo", Role.DECODE), 5)]
    async with surface() as server:
        server.services.metrics.desired = lambda: dict(both[::order])
        answer = await server.request("GET", "/admin/scale?role=decode&zone=")
    assert answer.json["desired"] == 5


@pytest.mark.parametrize("query", ["?role=prefill&zone=", "?zone=b", "?model=another"])
async def test_a_number_that_was_never_set_is_not_zero(query: str) -> None:
    async with surface() as server:
        server.services.metrics.desired = lambda: DESIRED
        answer = await server.request("GET", f"/admin/scale{query}")
        assert answer.status == 404
        server.services.metrics.desired = dict
        assert (await server.request("GET", "/admin/scale")).json["desired"] is None


async def test_numbers_are_followed_and_stay_while_redis_is_away(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        place = RedisMembersConfig(redis.url, timeout_s=60.0)
        config = server_config(scale=ScaleConfig(place, poll_s=0.01))
        desired = DesiredWorkers(config)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(desired.run)
            redis.command("HSET", "{triolet}:triolet:desired", '["", "decode", "a"]', "3")
            await until(lambda: desired.numbers == {Place("", Role.DECODE, "a"): 3})
            with capture_logs() as logs:
                redis.stop()
                await until(lambda: "membership_store_failed" in [one["event"] for one in logs])
            assert desired.numbers
            redis.start()
            redis.command("DEL", "{triolet}:triolet:desired")
            await until(lambda: not desired.numbers)
            nursery.cancel_scope.cancel()


def test_the_redis_of_the_members_counts_if_no_other_is_named() -> None:
    members = MembershipConfig(redis=RedisMembersConfig("redis://members"))
    config = server_config(membership=members)
    assert config.desired_redis.url == "redis://members"
    other = replace(config, scale=ScaleConfig(RedisMembersConfig("redis://other")))
    assert other.desired_redis.url == "redis://other"

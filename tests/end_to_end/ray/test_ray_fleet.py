"""Tests that streams stay exact on a Ray fleet while nodes, zones and Ray's head are killed and the
number of workers changes. `-s` prints the figures of docs/operations/ray.md."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

import httpx2
import pytest
import trio

from loadtest.campaign.client import ask_all
from loadtest.restart import long_asks
from tests.end_to_end.fleet_process import wait_until

from .ray_cluster import PATIENCE_S, ray_fleet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import psutil

    from loadtest.campaign.answers import Answer, Ask
    from loadtest.campaign.client import Story


pytest.importorskip("ray", reason="Ray is not installed (`make ray-test`)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

STREAMS: Final = 40
ASKS: Final = long_asks(STREAMS, max_tokens=100, seed=3)
"""Streams of 2.5 to 5 s."""


class Load:
    """Concurrent streams at one server, with answers known from an undisturbed run.

    Args:
      url: the server.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._expected: dict[int, Answer | None] = {}

    async def run_undisturbed(self) -> None:
        """Learn the answers."""
        stories = await ask_all(self._url, ASKS, STREAMS, lambda _: None)
        assert [story.failure for story in stories if story.failure] == []
        self._expected = {story.ask.number: story.answer for story in stories}

    async def run_while(self, happens: Callable[[], None]) -> None:
        """Run all streams repeatedly until an event that starts while all of them run has ended,
        and check their answers."""
        stories: list[Story] = []
        is_over = trio.Event()

        async def keep_asking(ask: Ask) -> None:
            while not is_over.is_set():
                stories.extend(await ask_all(self._url, [ask], 1, lambda _: None))

        with trio.fail_after(2 * PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for ask in ASKS:
                    nursery.start_soon(keep_asking, ask)
                await trio.to_thread.run_sync(self._wait_until_all_run)
                await trio.to_thread.run_sync(happens)
                is_over.set()
        assert [story.failure for story in stories if story.failure] == []
        assert {story.ask.number for story in stories} == self._expected.keys()
        assert all(story.answer == self._expected[story.ask.number] for story in stories)
        print(f"{len(stories)} streams")  # noqa: T201

    def _wait_until_all_run(self) -> None:
        def do_run() -> bool:
            return int(httpx2.get(f"{self._url}/load", timeout=60).json()["running"]) == STREAMS

        wait_until(do_run, PATIENCE_S, "all streams run")


def names(zones: str, **counts: int) -> set[str]:
    """Return the names of the workers of some zones."""
    return {f"{role}-{zone}-{n}" for zone in zones for role in counts for n in range(counts[role])}


def say(what: str, since: float) -> None:
    print(f"{what}: {time.monotonic() - since:.1f} s")  # noqa: T201


def have_ended(processes: list[psutil.Process]) -> bool:
    return not [one for one in processes if one.is_running() and one.status() != "zombie"]


def have_moved(labels: dict[str, dict[str, str]]) -> bool:
    """Return whether the workers of zone a run elsewhere."""
    zones = [labels.get(name, {}).get("zone", "a") for name in names("a", prefill=1, decode=1)]
    return "a" not in zones


@pytest.mark.parametrize("is_whole_zone", [False, True], ids=["raylet", "zone"])
async def test_a_lost_node_costs_no_stream_and_its_workers_start_elsewhere(
    tmp_path: Path, is_whole_zone: bool
) -> None:
    with ray_fleet(tmp_path, "abc") as fleet:
        fleet.run("fleet", "up")
        url, workers = fleet.url("c"), names("abc", prefill=1, decode=1)
        stand_ins = {f"{name}-stand-in-b" for name in names("a", prefill=1, decode=1)}
        fleet.wait_for_workers(url, workers)
        load = Load(url)
        await load.run_undisturbed()

        def lose_node() -> None:
            lost, began = fleet.processes("a"), time.monotonic()
            assert len(lost) >= 2 * len(workers) // 3
            (fleet.kill_zone if is_whole_zone else fleet.kill_raylet)("a")
            wait_until(lambda: stand_ins <= fleet.workers(url).keys(), PATIENCE_S, "replaced")
            say("stand-ins serve for its workers", began)
            wait_until(lambda: have_ended(lost), PATIENCE_S, "no orphan is left")
            say("the last process of the node was seen to have ended", began)
            wait_until(lambda: have_moved(fleet.workers(url)), PATIENCE_S, "Ray has restarted")
            fleet.wait_for_workers(url, workers)
            say("Ray's own serve, and the stand-ins have left", began)

        await load.run_while(lose_node)
        assert "it runs in zone" in fleet.run("fleet", "status", "--on", "ray")


async def test_the_number_of_workers_changes_under_load_and_no_stream_fails(
    tmp_path: Path,
) -> None:
    with ray_fleet(tmp_path, "a") as fleet:
        fleet.run("fleet", "up")
        url = fleet.url("a")
        fleet.wait_for_workers(url, names("a", prefill=1, decode=1))
        load = Load(url)
        await load.run_undisturbed()

        def scale(count: int) -> None:
            began = time.monotonic()
            fleet.run("scale", f"decode={count}", "--zone", "a", "--on", "ray")
            say(f"decode={count}", began)
            fleet.wait_for_workers(url, names("a", prefill=1, decode=count))

        for count in (3, 1):
            await load.run_while(partial(scale, count))
        assert fleet.status() == {(role, "a"): (1, 1) for role in ("decode", "prefill", "server")}


async def test_a_fleet_serves_on_without_the_head_of_ray(tmp_path: Path) -> None:
    with ray_fleet(tmp_path, "a") as fleet:
        fleet.run("fleet", "up")
        url, workers = fleet.url("a"), names("a", prefill=1, decode=1)
        fleet.wait_for_workers(url, workers)
        load = Load(url)
        await load.run_undisturbed()
        present = fleet.processes("a")
        await load.run_while(fleet.kill_head)
        await load.run_while(lambda: None)
        assert fleet.processes("a") == present
        assert fleet.workers(url).keys() == workers
        error = fleet.run("fleet", "status", "--on", "ray", code=1)
        assert error.splitlines()[-1].startswith("triolet: there is no Ray cluster at ray: ")

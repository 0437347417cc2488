"""Tests that commands which a Ray fleet cannot carry out end in time, with one line that says what
is missing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.fleet_process import wait_until

from .ray_cluster import PATIENCE_S, ray_fleet

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .ray_cluster import RayFleet

pytest.importorskip("ray", reason="Ray is not installed (`make ray-test`)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    with ray_fleet(tmp_path_factory.mktemp("ray"), "a") as running:
        running.run("fleet", "up")
        yield running


def refused(fleet: RayFleet, *words: str) -> str:
    """Return the error line of a command that fails."""
    return fleet.run(*words, code=1).splitlines()[-1]


def test_a_second_start_starts_nothing(fleet: RayFleet) -> None:
    before = fleet.processes("a")
    output = fleet.run("fleet", "up")
    assert "starts" not in output
    assert output.endswith("done: every process is ready\n")
    assert fleet.processes("a") == before
    assert fleet.status() == {(role, "a"): (1, 1) for role in ("decode", "prefill", "server")}


@pytest.mark.parametrize(
    ("zone", "option", "lack"),
    [
        ("x", "ray.cpus=0.5", "no node has the label zone=x (zones: a, none)"),
        ("a", "ray.gpus=1", "no node of zone a has 1 GPU (at most 0)"),
        ("a", "ray.cpus=9", "no node of zone a has 9 CPU (at most 8)"),
    ],
)
def test_what_no_node_can_take_is_said_in_time_and_shown(
    fleet: RayFleet, zone: str, option: str, lack: str
) -> None:
    zones = 'ray.zones=["a", "x"]'
    words = ("--zone", zone, "--on", "ray", "--set", zones, "--set", option)
    words += ("--set", "ray.place_timeout_s=1")
    line = refused(fleet, "scale", "decode=2", *words)
    assert line == (
        f"triolet: decode --zone {zone} cannot be placed: {lack} for 1 s; add such a node, or "
        "change ray.zones, ray.cpus or ray.gpus"
    )
    assert fleet.status()["decode", zone] == (int(zone == "a"), 2)
    fleet.run("scale", f"decode={int(zone == 'a')}", "--zone", zone, "--on", "ray", "--set", zones)


def test_a_process_that_cannot_start_says_why(fleet: RayFleet) -> None:
    (wrong := fleet.folder / "wrong.toml").write_text(
        (fleet.folder / "triolet.toml").read_text().replace('"demo"', '"/no/model"')
    )
    words = ("decode=2", "--zone", "a", "--on", "ray")
    line = refused(fleet, "scale", *words, "--config", str(wrong))
    assert re.match(r"triolet: decode-a-1: .*/no/model", line)
    assert "  decode-a-1: " in fleet.run("fleet", "status", "--on", "ray")
    fleet.run("scale", "decode=1", *words[1:])


def test_a_process_that_is_killed_twice_is_back(fleet: RayFleet) -> None:
    for _ in range(2):
        [decode] = [one for one in fleet.processes("a") if "decode" in one.cmdline()]
        decode.kill()
        wait_until(lambda: not decode.is_running(), PATIENCE_S, "it has ended")  # noqa: B023
        wait_until(lambda: fleet.status()["decode", "a"] == (1, 1), PATIENCE_S, "it is back")


def test_a_terminated_actor_lets_its_process_drain_and_starts_another(fleet: RayFleet) -> None:
    [decode] = [one for one in fleet.processes("a") if "decode" in one.cmdline()]
    decode.parent().terminate()
    wait_until(lambda: not decode.is_running(), PATIENCE_S, "it has drained")
    wait_until(lambda: fleet.status()["decode", "a"] == (1, 1), PATIENCE_S, "another serves")


@pytest.mark.parametrize("address", ["ray://127.0.0.1:1", "ray://no.such.host.invalid:10001"])
def test_a_wrong_address_of_the_head_is_said(fleet: RayFleet, address: str) -> None:
    line = refused(fleet, "fleet", "status", "--on", address)
    assert line.startswith(f"triolet: there is no Ray cluster at {address}: ")


def test_the_end_of_a_fleet_leaves_no_process(fleet: RayFleet) -> None:
    output = fleet.run("fleet", "down")
    assert output.endswith("done: no process is left\n")
    assert [one for one in fleet.processes("a") if "triolet" in " ".join(one.cmdline())] == []
    assert fleet.status() == {}

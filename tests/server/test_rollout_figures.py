"""Tests of what a server shows of rollouts: GET /fleet/rollouts and metrics."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from server.api.served_models import ModelTable
from server.metrics.exposition import merging
from server.metrics.metrics import Metrics
from server.scheduling.control_link import ControlLink
from tests.server.support.fakes import FakeFleet
from tests.server.support.rollouts import ENDED, VIEW
from tests.server.support.surface import requested, surface
from transport.control_protocol import Models, decode_told, encoded
from transport.memory_network import MemoryNetwork
from transport.rollout_protocol import RolloutPhase
from triolet.config import ServerConfig
from triolet.config.routes import Route

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from transport.rollout_protocol import RolloutView

LABELS = 'model="chat",version="chat-2"'
CONTROL = "inproc://control"


def samples(
    views: Sequence[RolloutView], valid_s: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the samples of rollouts and routes by name and labels, each of them once."""
    metrics = Metrics("demo", "none")
    metrics.watch(FakeFleet().status, lambda: 0)
    metrics.rollouts.hear(tuple(views))
    metrics.route_valid_s = lambda: valid_s or {}
    lines = metrics.exposition().decode().splitlines()
    own = ("triolet_rollout_", "triolet_shadow_", "triolet_route_")
    found = [line.rpartition(" ") for line in lines if line.startswith(own)]
    assert len({name for name, _, _ in found}) == len(found)
    return {name: float(value) for name, _, value in found}


def test_a_rollout_has_its_share_step_phase_counts_costs_and_shadow_sums() -> None:
    found = samples([VIEW], {"chat": 7.5})
    for name, labels, value in (
        ("rollout_share", "", 0.1),
        ("rollout_step", "", 2),
        ("rollout_phase", 'phase="canary"', 1),
        ("rollout_phase", 'phase="paused"', 0),
        ("rollout_requests", 'signal="errors",arm="stable",result="bad"', 10),
        ("rollout_requests", 'signal="errors",arm="candidate",result="good"', 117),
        ("rollout_requests", 'signal="ttft",arm="candidate",result="bad"', 0),
        ("rollout_cost_ratio", 'bound="low"', 0.95),
        ("rollout_cost_ratio", 'bound="high"', 1.21),
        ("shadow_pairs", "", 40),
        ("shadow_failed", "", 2),
        ("shadow_skipped", "", 3),
        ("shadow_rows_while_waiting", "", 0),
        ("shadow_same_finish", "", 38),
        ("shadow_equal_tokens", "", 900),
        ("shadow_tokens", 'arm="candidate"', 990),
        ("shadow_ttft_seconds", 'arm="stable"', 4.0),
        ("shadow_itl_seconds", 'arm="candidate"', 0.84),
    ):
        given = ",".join(sorted(filter(None, (*LABELS.split(","), *labels.split(",")))))
        assert found[f"triolet_{name}{{{given}}}"] == value, name
    phases = [name for name in found if name.startswith("triolet_rollout_phase")]
    assert len(phases) == len(RolloutPhase)
    assert found['triolet_route_valid_seconds{model="chat"}'] == 7.5


def test_only_the_latest_rollout_of_a_candidate_is_exported() -> None:
    assert samples([VIEW, ENDED]) == samples([ENDED, VIEW]) == samples([VIEW])
    other = replace(ENDED, candidate="chat-3")
    assert samples([VIEW, other])['triolet_rollout_share{model="chat",version="chat-3"}'] == 0


def test_a_rollout_without_bounds_of_its_cost_has_none() -> None:
    found = samples([replace(VIEW, cost=None, counts={})])
    assert not [name for name in found if "cost" in name or "requests" in name]


def test_nothing_is_exported_once_control_forgets_a_rollout() -> None:
    assert samples([]) == {}


def test_servers_on_one_port_show_a_rollout_once_and_each_the_age_of_its_route() -> None:
    metrics = Metrics("demo", "none")
    metrics.watch(FakeFleet().status, lambda: 0)
    metrics.rollouts.hear((VIEW,))
    metrics.route_valid_s = lambda: {"chat": 3.0}
    own = metrics.exposition().decode()
    merged = "".join(merging({"server-0": own, "server-1": own}))
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert len(families["triolet_rollout_share"].samples) == 1
    assert len(families["triolet_shadow_pairs"].samples) == 1
    servers = [one.labels["server"] for one in families["triolet_route_valid_seconds"].samples]
    assert servers == ["server-0", "server-1"]


def test_what_control_tells_is_shown_until_it_tells_otherwise() -> None:
    config = ServerConfig(control_addresses=(CONTROL,))
    metrics = Metrics("demo", "none")
    with closing(MemoryNetwork()) as network:
        link = ControlLink(config, network, "server", {}, rollouts=metrics.rollouts)
        link._use(decode_told(encoded(Models((), rollouts=(VIEW, ENDED)))))
        assert metrics.rollouts.views == (VIEW, ENDED)
        link._use(Models(()))
        assert metrics.rollouts.views == ()


async def test_the_answer_has_control_s_words_and_how_long_the_route_is_valid() -> None:
    async with surface() as server:
        assert (await server.request("GET", "/fleet/rollouts")).json["data"] == []
        services = server.services
        route = Route({"demo": 1.0}, "demo", 3, valid_until=services.wall() + 8)
        object.__setattr__(services, "models", ModelTable([*services.models], {"chat": route}))
        services.metrics.rollouts.hear((VIEW, replace(VIEW, id="r2", model="code"), ENDED))
        answer = (await server.request("GET", "/fleet/rollouts")).json
    assert answer["object"] == "list"
    chat, code, ended = answer["data"]
    assert 0 < chat.pop("route_valid_s") <= 8
    assert (code["route_valid_s"], ended["route_valid_s"]) == (0, None)
    assert chat.pop("share") == 0.1
    assert chat["counts"]["errors"] == [990, 10, 117, 3]
    assert chat["history"][0]["actor"] == "alice"
    assert chat.keys() == {*VIEW.__struct_fields__}


@pytest.mark.parametrize(
    ("changes", "route", "valid_s"),
    [
        ({}, Route({"demo": 1.0}, "demo", 3), 0.0),  # a permanent one
        ({}, Route({"demo": 1.0}, "demo", 3, valid_until=1.0), 0.0),
        ({"phase": RolloutPhase.PAUSED}, None, 0.0),
        ({"phase": RolloutPhase.PAUSED, "step": 0}, None, None),
        ({"phase": RolloutPhase.SHADOW, "step": 0}, None, None),
        ({"zones": ("", "b")}, None, 0.0),
        ({"zones": ("a", "b")}, None, None),  # this server's zone has the old version yet
        ({"phase": RolloutPhase.PROMOTED}, None, None),
    ],
)
async def test_a_rollout_without_a_valid_route_shows_0_if_it_should_have_one(
    changes: dict[str, Any], route: Route | None, valid_s: float | None
) -> None:
    async with surface() as server:
        services = server.services
        routes = {} if route is None else {"chat": route}
        object.__setattr__(services, "models", ModelTable([*services.models], routes))
        services.metrics.rollouts.hear((replace(VIEW, **changes),))
        assert services.route_valid_s().get("chat") == valid_s


async def test_what_a_proxy_passes_on_is_refused() -> None:
    answer = await requested("GET", "/fleet/rollouts", headers={"Via": "1.1 proxy"})
    assert answer.status == 403


@pytest.mark.parametrize(
    ("phase", "share"),
    [(RolloutPhase.PAUSED, 0.1), (RolloutPhase.PROMOTED, 1.0), (RolloutPhase.ROLLED_BACK, 0.0)],
)
def test_the_share_follows_the_phase(phase: RolloutPhase, share: float) -> None:
    assert samples([replace(VIEW, phase=phase)])[f"triolet_rollout_share{{{LABELS}}}"] == share

"""Tests of worker labels (zone, pool and others), from the settings to the servers' status page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from structlog.testing import capture_logs

from ops.settings.sources import SettingSources
from server.scheduling.links import Links
from tests.server.scheduling.fakes import server_config
from tests.server.tiny_text import tiny_text
from transport.codec import decode, encode
from transport.frames import Capacity, Peer, Welcome
from triolet.config import LabelsConfig
from triolet.errors import ConfigError, RemoteProtocolError
from triolet.ids import Role

from .fleet import open_fleet

if TYPE_CHECKING:
    from trio.testing import MockClock

LABELS = LabelsConfig(zone="eu-1a", host="n7", pool="spot", price_class="a.100", preemptible=True)
TOLD = {
    "zone": "eu-1a",
    "host": "n7",
    "pool": "spot",
    "price_class": "a.100",
    "preemptible": "true",
}


class NewerLabels(LabelsConfig):
    """Labels of a newer release with one more field."""

    @property
    def told(self) -> dict[str, str]:
        return TOLD | {"rack": "r1"}


@pytest.mark.parametrize("labels", [LABELS, NewerLabels()])
async def test_servers_show_the_labels_that_they_know_and_name_others_in_one_line(
    labels: LabelsConfig, autojump_clock: MockClock
) -> None:
    async with open_fleet(labels=labels) as fleet:
        config = server_config(
            prefill_addresses=(fleet.configs[Role.PREFILL].control_address,),
            decode_addresses=(fleet.configs[Role.DECODE].control_address,),
        )
        server = Links(config, tiny_text(), fleet.network)
        with capture_logs() as logged:
            async with trio.open_nursery() as nursery:
                await nursery.start(server.run)
                await server.wait_ready()
                await trio.sleep(10 * config.link.peer_timeout_s)
                shown = {one.role: one for one in server.status().workers}
                nursery.cancel_scope.cancel()
    assert shown[Role.DECODE].labels == TOLD
    assert shown[Role.DECODE].state == "alive"
    assert shown[Role.PREFILL].labels == {}
    unknown = [one["labels"] for one in logged if one["event"] == "worker_labels_unknown"]
    assert unknown == ([["rack"]] if isinstance(labels, NewerLabels) else [])


def test_a_worker_without_labels_is_understood_by_peers_that_know_of_none() -> None:
    plain = Welcome(Peer(Role.DECODE, "d", 1), 3, "f", Capacity(1, 1, 1, 1, 1))
    old_length = 8
    assert encode(plain)[0] == 0x90 + old_length - 1
    labelled = Welcome(plain.peer, 3, "f", plain.capacity, labels={"zone": "a"})
    assert decode(encode(labelled), 1000) == labelled
    too_long = Welcome(plain.peer, 3, "f", plain.capacity, labels={"zone": "a" * 64})
    with pytest.raises(RemoteProtocolError):
        decode(encode(too_long), 1000)


def test_settings_set_labels_and_refuse_unknown_names_and_values() -> None:
    def labels(name: str, value: str) -> LabelsConfig:
        sources = SettingSources()
        sources.add(("worker", "labels", name), value, "--set")
        return sources.settings().worker(Role.PREFILL).labels

    assert labels("zone", "eu-1a").told == {"zone": "eu-1a"}
    for name, value in (("zone", "a b"), ("zone", "a" * 64), ("rack", "r1")):
        with pytest.raises(ConfigError, match=name):
            labels(name, value)

"""Tests of data residency: prompts and answers of a tenant that may only use some zones reach no
worker in another zone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from server.contract.generation import Finished
from server.scheduling.links import Links
from tests.server.tiny_text import tiny_text
from transport.memory_network import MemoryNetwork
from transport.memory_pipe import Conditions, Faults
from transport.tokens import pack_tokens
from triolet.config import LocalPrefill, RoutingConfig
from triolet.errors import RequestError
from triolet.service_class import DEFAULT_SCHEDULING, Placement, Scheduling

from .fake_processes import FakeProcess
from .fakes import FakeDecode, FakePrefill, make_request, server_config
from .test_dispatch import world_of
from .test_fleet import read_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transport.memory_pipe import LinkName

CANARY = "canary in a coal mine"
SECRET = pack_tokens(tuple(CANARY.encode()))
EU = Scheduling("bound", placement=Placement(frozenset({"eu"})))


class Recorder(Conditions):
    """Records which workers received a marker text of that tenant."""

    def __init__(self) -> None:
        super().__init__(0, Faults())
        self.addresses: set[str] = set()

    def on_put(self, link: LinkName, direction: str, parts: Sequence[bytes | memoryview]) -> None:
        if any(SECRET in bytes(part) for part in parts):
            self.addresses.add(link[0])


@pytest.mark.parametrize("mode", LocalPrefill)
@pytest.mark.usefixtures("autojump_clock")
async def test_a_canary_reaches_no_worker_of_another_zone_while_workers_die(
    mode: LocalPrefill,
) -> None:
    network, recorder = MemoryNetwork(), Recorder()
    network.conditions = recorder
    decodes = [FakeDecode(f"d-{z}", labels={"zone": z[:2]}) for z in ("eu", "us", "us2")]
    prefills = [FakePrefill(f"p-{z}", labels={"zone": z[:2]}) for z in ("eu", "us", "us2")]
    fleet = Links(
        server_config(
            prefill_addresses=tuple(f"mem://{one.name}" for one in prefills),
            decode_addresses=tuple(f"mem://{one.name}" for one in decodes),
            routing=RoutingConfig(mode),
            zone="us",
        ),
        tiny_text(),
        network,
    )
    async with trio.open_nursery() as nursery:
        processes = [FakeProcess(network, one, decodes) for one in prefills]
        processes += [FakeProcess(network, one) for one in decodes]
        for process in processes:
            await nursery.start(process.run)
        await nursery.start(fleet.run)
        await trio.sleep(1.0)
        ends = []

        async def client(number: int, prompt: str, scheduling: Scheduling) -> None:
            request = make_request(number, prompt=prompt, max_tokens=100, scheduling=scheduling)
            ends.append((await read_all(fleet.submit(request)))[1])

        async with trio.open_nursery() as clients:
            for number in range(12):
                clients.start_soon(client, number, CANARY, EU)
                clients.start_soon(client, 100 + number, "free", DEFAULT_SCHEDULING)
            await trio.sleep(0.5)
            assert decodes[0].rows, "its requests are in the middle"
            processes[3].kill()
            decodes[0] = FakeDecode("d-eu", epoch=2, labels={"zone": "eu"})
            await trio.sleep(3.0)
            await nursery.start(FakeProcess(network, decodes[0]).run)
        assert [type(end) for end in ends] == [Finished] * 24
        nursery.cancel_scope.cancel()
    own = {"mem://d-eu", "mem://p-eu"} - ({"mem://p-eu"} if mode is LocalPrefill.ALWAYS else set())
    assert recorder.addresses == own


def test_without_a_worker_of_its_zones_a_request_is_refused() -> None:
    labels = {"zone": "us"}
    world = world_of(FakePrefill("p-us", labels=labels), FakeDecode("d-us", labels=labels))
    with pytest.raises(RequestError, match="no decode worker in the zone eu is available") as error:
        world.submit(make_request(1, scheduling=EU))
    assert error.value.status == 503

"""Tests of spare addresses: a spare worker substitutes one that is being replaced and is otherwise
not missed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from .fake_processes import FakeProcess
from .fakes import FakeDecode
from .test_fleet import Cluster, names, running, unbroken

if TYPE_CHECKING:
    from trio.testing import MockClock

SPARE = "mem://decode-spare"
ADDRESSES = ("mem://decode-0", SPARE)


async def audited(cluster: Cluster) -> set[str]:
    return {view.name for view in (await cluster.fleet.audit()).workers}


async def test_a_stand_in_is_used_while_it_is_there_and_missed_by_nobody(
    autojump_clock: MockClock,
) -> None:
    async with running(decode_addresses=ADDRESSES, spare_addresses=(SPARE,)) as cluster:
        everybody = {"prefill-0": "alive", "decode-0": "alive"}
        await trio.sleep(60.0)
        assert names(cluster) == everybody
        assert await audited(cluster) == set(everybody)

        spare = FakeDecode("decode-spare", epoch=77)
        cluster.decodes.append(spare)
        process = FakeProcess(cluster.network, spare)
        await cluster.nursery.start(process.run)
        await trio.sleep(2.0)
        assert names(cluster) == everybody | {"decode-spare": "alive"}

        # The only other one leaves: the role still has a worker, and the stream moves there.
        async with unbroken(cluster, 60, 5):
            cluster.decode_process.kill()
        assert spare.steps > 0
        assert names(cluster)["decode-0"] == "dead"

        await cluster.restart_decode(kill=False)
        await trio.sleep(2.0)
        process.kill()
        await trio.sleep(60.0)
        assert names(cluster) == everybody
        assert await audited(cluster) == set(everybody)
        assert cluster.fleet.status().is_ready

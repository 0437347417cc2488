"""A worker at a spare address stands in for one that is replaced; it is not missed before or
after."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from server.contract.generation import Finished

from .fake_processes import FakeProcess
from .fakes import FakeDecode, completion_ids, make_request
from .test_fleet import Cluster, read_all, read_some, running

if TYPE_CHECKING:
    from trio.testing import MockClock

SPARE = "mem://decode-spare"
ADDRESSES = ("mem://decode-0", SPARE)


def states(cluster: Cluster) -> dict[str, str]:
    return {worker.name: worker.state for worker in cluster.fleet.status().workers}


async def audited(cluster: Cluster) -> set[str]:
    return {view.name for view in (await cluster.fleet.audit()).workers}


async def test_a_stand_in_is_used_while_it_is_there_and_missed_by_nobody(
    autojump_clock: MockClock,
) -> None:
    async with running(decode_addresses=ADDRESSES, spare_addresses=(SPARE,)) as cluster:
        everybody = {"prefill-0": "alive", "decode-0": "alive"}
        await trio.sleep(60.0)
        assert states(cluster) == everybody
        assert await audited(cluster) == set(everybody)

        spare = FakeDecode("decode-spare", epoch=77)
        cluster.decodes.append(spare)
        process = FakeProcess(cluster.network, spare)
        await cluster.nursery.start(process.run)
        await trio.sleep(2.0)
        assert states(cluster) == everybody | {"decode-spare": "alive"}

        # The only other one leaves: the role is not without a worker, and the stream moves there.
        moved = cluster.fleet.submit(make_request(1, max_tokens=60))
        before = await read_some(moved, 5)
        cluster.decode_process.kill()
        token_ids, end = await read_all(moved)
        assert before + token_ids == completion_ids(0, 60)
        assert isinstance(end, Finished)
        assert spare.steps > 0
        assert states(cluster)["decode-0"] == "dead"

        await cluster.restart_decode(kill=False)
        await trio.sleep(2.0)
        process.kill()
        await trio.sleep(60.0)
        assert states(cluster) == everybody
        assert await audited(cluster) == set(everybody)
        assert cluster.fleet.status().is_ready

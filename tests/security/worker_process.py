"""A worker process for security tests, with real sockets, plaintext KV and an engine that computes
nothing.

Run as `python -m tests.security.worker_process PARENT ROLE CONTROL KV KEYS`.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import trio

import decode.worker
import prefill.worker
from ops.logs import configure_logs
from ops.own_process import hold_on_to
from tests.worker.scripts import scripted_engine
from transport.zmq_network import ZmqNetwork
from triolet.config import EngineConfig, LinkConfig, WireConfig, WorkerConfig
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STEP_S = 0.002
SERVE = {Role.PREFILL: prefill.worker.serve, Role.DECODE: decode.worker.serve}


class Device:
    """Takes a moment for each step, so that a stream lasts long enough to attack."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        await trio.sleep(STEP_S)
        return fn(*args)


async def serve(role: Role, control: str, kv: str, keys: str) -> None:
    link = LinkConfig(wire=WireConfig(plaintext=True))
    config = WorkerConfig(
        name=f"{role}-0",
        model_dir="",
        control_address=control,
        kv_address=kv or None,
        engine=EngineConfig(max_num_seqs=8),
        link=link,
    )
    with (
        closing(ZmqNetwork(link, keys)) as control_network,
        closing(ZmqNetwork(link, keys, is_plain=True)) as kv_network,
    ):
        async with trio.open_nursery() as nursery:
            engine = scripted_engine(256)
            await nursery.start(SERVE[role], config, engine, Device(), control_network, kv_network)
            print("ready", flush=True)  # noqa: T201
            await trio.sleep_forever()


if __name__ == "__main__":
    hold_on_to(int(sys.argv[1]))
    configure_logs("info", sys.argv[2])
    trio.run(serve, Role(sys.argv[2]), *sys.argv[3:])

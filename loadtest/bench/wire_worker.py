"""One worker of the wire's benchmark as a process: `python -m loadtest.bench.wire_worker`.

The production worker, whole, with its KV links on ZeroMQ. Its control side stays inside the process
(wire_server.py); what is to be done comes as lines of JSON on stdin.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog
import trio

import decode.worker
import prefill.worker
from engine.device_thread import DeviceThread
from engine.load import load_engine
from transport.frames import KvTarget, Peer
from transport.memory_network import MemoryNetwork
from transport.zmq_memory import keep_received_memory
from transport.zmq_network import ZmqNetwork
from triolet.config import Dtype, EngineConfig, LinkConfig, MemorySharing, WireConfig, WorkerConfig
from triolet.ids import Role
from triolet.units import MIB
from worker.local_engine import LocalEngine

from .wire_engine import MAX_MODEL_LEN, NoDevice, StoredEngine
from .wire_server import SERVER, BenchServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from worker.engine_port import EnginePort
    from worker.worker_loop import Device

CONTROL: Final = "memory:control"
SERVE: Final[dict[Role, Callable[..., Awaitable[Any]]]] = {
    Role.PREFILL: prefill.worker.serve,
    Role.DECODE: decode.worker.serve,
}


def cpu_s() -> float:
    """Return what the process and the kernel on its behalf have computed so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def answer(server: BenchServer, request: dict[str, Any]) -> dict[str, Any]:
    """Do one thing and say how it went."""
    numbers = range(request["first"], request["first"] + request["count"])
    match request["do"]:
        case "reserve":
            await server.reserve(numbers, request["tokens"])
            return {}
        case "prefill":
            role, name, epoch = request["peer"]
            target = KvTarget(Peer(Role(role), name, epoch), request["address"])
            began_cpu_s = cpu_s()
            began_at, courses = await server.prefill(
                numbers, request["tokens"], target, request["held"]
            )
            return {
                "seconds": max(course.ended_at for course in courses) - began_at,
                "first_token_s": [course.first_token_at - began_at for course in courses],
                "cpu_s": cpu_s() - began_cpu_s,
                "reasons": sorted({course.reason for course in courses}),
            }
        case _:
            began_cpu_s = cpu_s()
            courses = await server.finish(numbers)
            return {
                "cpu_s": cpu_s() - began_cpu_s,
                "reasons": sorted({course.reason for course in courses}),
            }


async def open_engine(
    arguments: argparse.Namespace, stack: AsyncExitStack
) -> tuple[EnginePort, Device]:
    """Return an engine that computes if a model is given, else one that only stores."""
    if arguments.model is None:
        engine = StoredEngine(arguments.size, arguments.pool_tokens, arguments.fingerprint)
        return engine, NoDevice()
    config = EngineConfig(
        dtype=Dtype.BFLOAT16,
        kv_pool_bytes=512 * MIB,
        threads=arguments.threads,
        prefix_cache=False,
    )
    device = await stack.enter_async_context(DeviceThread(2, arguments.threads, 5.0))
    loaded = await device.run(load_engine, arguments.model, config, lambda *_: None)
    return LocalEngine(loaded), device


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until stdin ends."""
    role, link = Role(arguments.role), link_of(arguments)
    memory = MemoryNetwork()
    if role is Role.DECODE:
        keep_received_memory(decode.worker.RECEIVE_WINDOWS * link.kv_window_bytes)
    async with AsyncExitStack() as stack:
        engine, device = await open_engine(arguments, stack)
        config = WorkerConfig(
            name=f"{role}-0",
            model_dir="",
            control_address=CONTROL,
            kv_address=arguments.address if role is Role.DECODE else None,
            engine=EngineConfig(max_num_seqs=64),
            link=link,
            max_waiting_tokens=64 * MAX_MODEL_LEN,
        )
        network = stack.enter_context(
            closing(ZmqNetwork(link, arguments.curve, is_plain=arguments.kv_plaintext))
        )
        nursery = await stack.enter_async_context(trio.open_nursery())
        await nursery.start(SERVE[role], config, engine, device, memory, network)
        connection = memory.connect(CONTROL, SERVER.identity(), hwm=1000, max_frame_bytes=16 * MIB)
        server = BenchServer(connection)
        nursery.start_soon(server.run)
        peer, address = await server.welcomed_by()
        say({"peer": peer, "address": address, "fingerprint": engine.fingerprint})
        while line := await trio.to_thread.run_sync(sys.stdin.readline):
            say(await answer(server, json.loads(line)))
        nursery.cancel_scope.cancel()


def link_of(arguments: argparse.Namespace) -> LinkConfig:
    """Return the bounds that are asked for."""
    link = LinkConfig(
        peer_timeout_s=30.0,
        lease_ttl_s=60.0,
        progress_timeout_s=60.0,
        kv_stall_s=30.0,
        wire=WireConfig(
            MemorySharing.ON if arguments.share_memory else MemorySharing.OFF,
            plaintext=arguments.kv_plaintext,
        ),
    )
    chosen = {
        "kv_chunk_bytes": arguments.chunk_bytes,
        "kv_window_bytes": arguments.window_bytes,
    }
    return replace(link, **{name: value for name, value in chosen.items() if value})


def say(message: dict[str, Any]) -> None:
    """Write one answer."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read what this worker is, and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--address", default="")
    parser.add_argument("--size", default="150m")
    parser.add_argument("--pool-tokens", type=int, default=0)
    parser.add_argument("--fingerprint", default="noise")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--chunk-bytes", type=int)
    parser.add_argument("--window-bytes", type=int)
    parser.add_argument("--share-memory", action="store_true")
    parser.add_argument("--curve")
    parser.add_argument("--kv-plaintext", action="store_true")
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(30),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    trio.run(serve, parser.parse_args())


if __name__ == "__main__":
    main()

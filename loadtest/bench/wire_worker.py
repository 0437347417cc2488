"""`python -m loadtest.bench.wire_worker`: one worker process of the KV path benchmark.

It runs the whole production worker, with its KV links on ZeroMQ. Its server is in the same process
(`BenchServer`) and is driven by lines of JSON on stdin.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import structlog
import torch
import trio

import decode.worker
import prefill.worker
from engine.block_ledger import BlockLedger
from engine.constraints import Constraints
from engine.device_thread import DeviceThread
from engine.kv_pool import KVLayout, KVPool
from engine.load import Engine, load_engine
from engine.pace import Pace
from engine.prefix_cache import PrefixCache
from simulation.engine import only_token
from store.measured import MeasurementKey
from transport.digest import kv_key
from transport.frames import (
    AttemptRow,
    Ended,
    FirstToken,
    Goodbye,
    Grant,
    KvTarget,
    Peer,
    Prefill,
    Refuse,
    Reserve,
    ServerHeartbeat,
    Welcome,
)
from transport.handshake import make_hello
from transport.memory_network import MemoryNetwork
from transport.tokens import pack_tokens
from transport.zmq_memory import keep_received_memory
from transport.zmq_network import ZmqNetwork
from triolet.config import (
    Dtype,
    EngineConfig,
    LinkConfig,
    MemorySharing,
    WireConfig,
    WorkerConfig,
)
from triolet.ids import SECRET_BYTES, AttemptKey, PeerId, Role
from triolet.sampling import SamplingParams
from triolet.units import MIB
from worker.local_engine import LocalEngine

from ..harness.lines import cpu_s, say
from .model import SHAPES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeVar, TypeVarTuple

    from engine.batch import Sampled, StepRow
    from engine.model_config import ModelConfig
    from engine.runner import Runner

    T = TypeVar("T")
    Ts = TypeVarTuple("Ts")
    from collections.abc import Awaitable

    from transport.frames import AnyFrame
    from transport.memory_network import MemoryConnection
    from worker.engine_port import EnginePort
    from worker.worker_loop import Device


BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 8192
_PATTERN_BYTES: Final = 8 * MIB


class NoSteps:
    """See engine.runner.Runner: its steps write nothing."""

    model = None

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Return the same token for every row that needs one."""
        return only_token(rows)


def stored_engine(size: str, num_tokens: int, fingerprint: str) -> Engine:
    """Return a production engine without a model, with noise in its pool.

    Args:
      size: name of a shape in `model.SHAPES`; its KV is bf16.
      num_tokens: capacity of the pool.
      fingerprint: fingerprint to announce.
    """
    shape = SHAPES[size]
    layout = KVLayout(
        shape.num_layers, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, torch.bfloat16
    )
    num_blocks = 1 + num_tokens // BLOCK_SIZE
    pool = KVPool(layout, num_blocks, torch.device("cpu"))
    # Unwritten pages would all map to one page of zeros, which costs nothing to read.
    flat = pool.blocks.view(-1).view(torch.uint8).numpy()
    noise = np.random.default_rng(0).integers(0, 256, _PATTERN_BYTES, dtype=np.uint8)
    for begin in range(0, len(flat), len(noise)):
        part = flat[begin : begin + len(noise)]
        part[:] = noise[: len(part)]
    ledger = BlockLedger(num_blocks)
    most = MAX_MODEL_LEN  # a whole prompt in one step: all of its KV exists immediately
    return Engine(
        cast("Runner", NoSteps()),
        pool,
        ledger,
        PrefixCache(ledger, BLOCK_SIZE, pool, is_enabled=False),
        fingerprint,
        MeasurementKey("none", "bfloat16", "none"),
        cast("ModelConfig", shape),
        (),
        most,
        "",
        Pace(most, 0.0, 1.0, most, most, chunk_tokens=most),
        Constraints(Path("no tokenizer"), shape.vocab_size, ()),
    )


class NoDevice:
    """Runs steps in the calling thread."""

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run a function."""
        return fn(*args)


SERVER: Final = PeerId(Role.SERVER, "bench", 1)
KV_SECRET: Final = bytes(SECRET_BYTES)
REMAINING_S: Final = 600.0
BEAT_S: Final = 0.5
ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""One token. It arrives with the last KV, and then decode is done."""


@dataclass(slots=True)
class Course:
    """Received frames of one attempt. Times are from Trio's clock."""

    granted: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)
    first_token_at: float = 0.0
    ended_at: float = 0.0
    reason: str = ""


class BenchServer:
    """The server side of one worker.

    Args:
      connection: connection to the worker's control listener.
    """

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection
        self._welcome: Welcome | None = None
        self._welcomed = trio.Event()
        self._courses: dict[AttemptKey, Course] = {}

    async def run(self) -> None:
        """Receive frames and send heartbeats until cancelled."""
        await self._connection.send(make_hello(SERVER))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat)
            while True:
                for message in await self._connection.receive_many():
                    self._hear(message.frame)

    async def welcomed_by(self) -> tuple[PeerId, str]:
        """Return the worker's identity and KV address."""
        await self._welcomed.wait()
        assert self._welcome is not None
        return self._welcome.peer.peer_id, self._welcome.kv_address

    async def reserve(self, numbers: range, num_tokens: int) -> None:
        """Get a lease for each prompt."""
        keys = [key_of(number) for number in numbers]
        for key in keys:
            self._courses[key] = Course()
            prompt = prompt_of(key, num_tokens)
            frame = Reserve(
                *key, prompt, b"", ONE_TOKEN, 0, 1, REMAINING_S, kv_key=kv_key(KV_SECRET, key)
            )
            self._connection.send_nowait(frame)
        for key in keys:
            await self._courses[key].granted.wait()

    async def prefill(
        self, numbers: range, num_tokens: int, target: KvTarget, held_blocks: int
    ) -> tuple[float, list[Course]]:
        """Have these prompts computed and transferred. Return the start and the course of each."""
        keys = [key_of(number) for number in numbers]
        prompts = [prompt_of(key, num_tokens) for key in keys]
        began_at = trio.current_time()
        for key, prompt in zip(keys, prompts, strict=True):
            self._courses[key] = Course()
            kv = kv_key(KV_SECRET, key)
            frame = Prefill(*key, prompt, target, ONE_TOKEN, 0, REMAINING_S, held_blocks, kv_key=kv)
            self._connection.send_nowait(frame)
        return began_at, await self.finish(numbers)

    async def finish(self, numbers: range) -> list[Course]:
        """Wait until these attempts have ended, and drop them."""
        courses = [self._courses[key_of(number)] for number in numbers]
        for course in courses:
            await course.over.wait()
        for number in numbers:
            del self._courses[key_of(number)]
        return courses

    async def _beat(self) -> None:
        while True:
            rows = tuple(AttemptRow(*key) for key in self._courses)
            self._connection.send_nowait(ServerHeartbeat(SERVER.epoch, rows))
            await trio.sleep(BEAT_S)

    def _hear(self, frame: AnyFrame) -> None:
        match frame:
            case Welcome():
                self._welcome = frame
                self._welcomed.set()
            case Grant():
                self._courses[frame.key].granted.set()
            case FirstToken():
                self._courses[frame.key].first_token_at = trio.current_time()
            case Ended() if frame.key in self._courses:
                course = self._courses[frame.key]
                course.ended_at, course.reason = trio.current_time(), frame.reason.value
                course.over.set()
            case Refuse() | Goodbye():
                raise RuntimeError(f"the worker refused: {frame}")
            case _:
                return  # heartbeats and tokens


def key_of(number: int) -> AttemptKey:
    """Return the attempt with this number."""
    return AttemptKey(number.to_bytes(16, "big"), 0)


def prompt_of(key: AttemptKey, num_tokens: int) -> bytes:
    """Return a prompt with a unique prefix."""
    number = int.from_bytes(key.request_id, "big")
    return pack_tokens([10 + (number * 7919 + index * 31) % 1987 for index in range(num_tokens)])


CONTROL: Final = "memory:control"
SERVE: Final[dict[Role, Callable[..., Awaitable[Any]]]] = {
    Role.PREFILL: prefill.worker.serve,
    Role.DECODE: decode.worker.serve,
}


async def answer(server: BenchServer, request: dict[str, Any]) -> dict[str, Any]:
    """Execute a command and return its result."""
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
    """Return an engine that computes if a model is given, else one that only stores KV."""
    if arguments.model is None:
        stored = stored_engine(arguments.size, arguments.pool_tokens, arguments.fingerprint)
        return LocalEngine(stored), NoDevice()
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
    """Return the link config of the command line."""
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


def main() -> None:
    """Parse the command line and serve."""
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

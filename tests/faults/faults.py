"""Fault injectors of the fault matrix: each causes its fault and proves that it happened, or fails
the cell.

An injector gets a fleet with two questions held in a phase. Its context starts when the fault is in
effect and ends when it is undone.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import trio

from transport.frames import (
    End,
    Ended,
    FirstToken,
    Goodbye,
    Grant,
    Hello,
    KvChunk,
    KvCredit,
    KvDone,
    KvManifest,
    Prefill,
    Reserve,
    TokenCredit,
    Tokens,
    Welcome,
)
from worker.worker_loop import EXIT_DEVICE_LOST

from .client import READ_BYTES, Surface
from .fleet import SERVER, WORKERS, FleetUnwellError
from .matches import between, frames
from .processes import FaultNotInjectedError, until
from .rules import Blackout, Fate, Rule, Way

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager
    from typing import TypeAlias

    from .fleet import Fleet
    from .phases import Hold
    from .rules import Wants

    Matching: TypeAlias = Callable[..., Wants]
    Injector: TypeAlias = Callable[[Fleet, Hold], AbstractAsyncContextManager[None]]

SHORT_STOP_S: Final = 0.4
"""Below every deadline: no client may notice."""
LEASE_S: Final = 2.0
LONG_STOP_S: Final = 2.6
"""Longer than a lease."""
PARTITION_S: Final = 3.0
WEDGE_S: Final = 3.0
PROOF_DEADLINE_S: Final = 60.0
UNANSWERED_S: Final = 0.3

OF_ATTEMPTS: Final = (
    *(Reserve, Grant, Prefill, FirstToken, KvChunk, KvManifest, KvCredit, KvDone, Tokens),
    *(TokenCredit, End, Ended, Hello, Welcome, Goodbye),
)
"""All frames except heartbeats."""


def _prove(is_proven: bool, what: str) -> None:
    if not is_proven:
        raise FaultNotInjectedError(what)


def _name(role: str, hold: Hold) -> str:
    """Return the process that plays a role in this cell."""
    return {"server": SERVER, "prefill": hold.prefill, "decode": hold.decode}[role]


def _each_client(leave: Callable[[Hold], None]) -> Injector:
    @asynccontextmanager
    async def inject(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
        leave(hold)
        yield

    return inject


def _reset(hold: Hold) -> None:
    for client in hold.clients:
        client.reset()


def _close(hold: Hold) -> None:
    for client in hold.clients:
        client.close()


@asynccontextmanager
async def say_close(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
    """Clients send a WebSocket close frame; the connections stay open."""
    for client in hold.clients:
        assert client.surface is Surface.WS
        await client.say_close()
    yield


@asynccontextmanager
async def stop_reading(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
    """Clients stop reading from their sockets."""
    for client in hold.clients:
        client.stop_reading()
    before = [client.num_bytes for client in hold.clients]
    yield
    # One read may have been in progress when it was told to stop.
    after = [client.num_bytes for client in hold.clients]
    most = max(b - a for a, b in zip(before, after, strict=True))
    _prove(most <= READ_BYTES, "a client went on reading")


def kill(role: str) -> Injector:
    """Kill a process with SIGKILL and wait until it is gone."""

    @asynccontextmanager
    async def inject(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
        await fleet.processes[_name(role, hold)].kill()
        yield

    return inject


def freeze(role: str, for_s: float) -> Injector:
    """Stop a process with SIGSTOP, then continue it; the kernel reports `T` in between."""

    @asynccontextmanager
    async def inject(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
        process = fleet.processes[_name(role, hold)]
        await process.freeze()
        try:
            async with trio.open_nursery() as nursery:

                async def thaw_later() -> None:
                    await trio.sleep(for_s)
                    hold.came_back[process.name] = time.time()
                    await process.thaw()

                nursery.start_soon(thaw_later)
                yield
        finally:
            with trio.CancelScope(shield=True):
                await process.thaw()
        if for_s > LEASE_S and process.name in WORKERS:
            with trio.move_on_after(PROOF_DEADLINE_S):
                await process.wait_line(lambda line: line.event == "fenced")
                return
            raise FleetUnwellError(f"{process.name} did not notice its own pause")

    return inject


def cut(one: str, other: str, way: Way | None = None, for_s: float = PARTITION_S) -> Injector:
    """Block links for a while, one way or both; the proxy has swallowed something."""

    @asynccontextmanager
    async def inject(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
        ways = frozenset(Way) if way is None else frozenset({way})
        blackout = Blackout(between(_name(one, hold), _name(other, hold)), ways)
        async with trio.open_nursery() as nursery:

            async def darken(task_status: trio.TaskStatus[None]) -> None:
                with fleet.proxy.blackout(blackout):
                    task_status.started()
                    await trio.sleep(for_s)

            await nursery.start(darken)
            yield
        _prove(blackout.hits > 0, "nothing was lost in the partition")

    return inject


def twist(
    fate: Fate, *kinds: type, limit: int | None = None, matching: Matching = frames
) -> Injector:
    """Apply a rule to frames for the rest of the cell; it has hit something."""

    @asynccontextmanager
    async def inject(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
        rule = Rule(fate, matching(*kinds), limit)
        with fleet.proxy.rule(rule):
            yield
            await fleet.proxy.release(rule)
        _prove(rule.hits > 0, f"no frame to {rule.fate.name.lower()}")

    return inject


def gate(role: str, order: str, for_s: float) -> Injector:
    """Make a device step raise, or block for a while."""

    @asynccontextmanager
    async def inject(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
        worker = fleet.processes[_name(role, hold)]

        def reached() -> int:
            return sum(line.event == "step_reached" for line in worker.lines.entries)

        before = reached()
        await fleet.arm(worker.name, order)
        await hold.let_go()
        with trio.move_on_after(PROOF_DEADLINE_S):
            await until(lambda: reached() > before)
        _prove(reached() > before, f"no step was reached on {worker.name}")
        async with trio.open_nursery() as nursery:

            async def open_later() -> None:
                await trio.sleep(for_s)
                hold.came_back[worker.name] = time.time()
                worker.order("go")

            nursery.start_soon(open_later)
            yield

    return inject


def poison(role: str) -> Injector:
    """Make a step raise and the device refuse further work, so that the process must exit."""

    @asynccontextmanager
    async def inject(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
        worker = fleet.processes[_name(role, hold)]
        await fleet.arm(worker.name, "poison 1")
        await hold.let_go()
        await worker.wait_ended(EXIT_DEVICE_LOST)
        yield

    return inject


@asynccontextmanager
async def exhaust_pool(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
    """Let two answers grow until the pool cannot hold both: one is preempted."""
    yield
    worker = fleet.processes[hold.decode]
    reasons = {line.fields.get("reason") for line in worker.lines.entries}
    _prove("preempted" in reasons, "the pool did not run out of blocks")


@asynccontextmanager
async def exhaust_files(fleet: Fleet, hold: Hold) -> AsyncIterator[None]:
    """Let the server open no more files while a client connects."""
    server = fleet.server
    before = server.limit_files(server.next_file())
    try:
        newcomer = await trio.open_tcp_stream("127.0.0.1", fleet.port)
        async with newcomer:
            await newcomer.send_all(b"GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            with trio.move_on_after(UNANSWERED_S) as waiting:
                await newcomer.receive_some(1)
            _prove(waiting.cancelled_caught, "the server still took a connection")
    finally:
        server.limit_files(before)
    yield


RESET: Final = _each_client(_reset)
CLOSE: Final = _each_client(_close)

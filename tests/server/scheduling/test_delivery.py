"""Tests of the order in which streams of several tenants get their tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from server.scheduling.delivery import (
    INPUTS_AT_ONCE,
    ROWS_PER_TURN,
    STREAMS_PER_CHECKPOINT,
    Delivery,
    Intake,
    RowQueue,
)
from transport.frames import TokenRow, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.contract.output_stream import OutputStream
    from server.scheduling.workers import Worker


def a_delivery() -> Delivery:
    return Delivery(cast("Any", None), cast("Any", None))


class FakeStream:
    """Records when it was called; optionally it is due again at once."""

    def __init__(
        self, tenant: str, order: list[str], delivery: Delivery, *, again: bool = False
    ) -> None:
        self.tenant = tenant
        self._order = order
        self._delivery = delivery
        self._again = again

    def deliver(self, now: float) -> None:
        self._order.append(self.tenant)
        if self._again:
            self.add()

    def add(self) -> None:
        self._delivery.add(cast("OutputStream", self))


async def test_a_tenant_with_many_streams_delays_another_one_by_one_stream() -> None:
    delivery, order = a_delivery(), list[str]()
    delivery.collect()
    for tenant in (*("many",) * 500, "one", "other"):
        FakeStream(tenant, order, delivery).add()
    delivery.deliver_collected()
    assert order[:4] == ["many", "one", "other", "many"]
    assert len(order) == STREAMS_PER_CHECKPOINT


async def test_what_one_turn_leaves_comes_in_the_next_ones() -> None:
    delivery, order = a_delivery(), list[str]()
    delivery.collect()
    for number in range(300):
        FakeStream(f"tenant {number % 3}", order, delivery).add()
    delivery.deliver_collected()
    assert len(order) == STREAMS_PER_CHECKPOINT
    for _ in range(3):
        delivery._deliver()
    assert sorted(order) == sorted(f"tenant {number % 3}" for number in range(300))


async def test_a_stream_that_is_due_again_at_once_keeps_nobody_waiting_for_ever() -> None:
    delivery, order = a_delivery(), list[str]()
    delivery.collect()
    FakeStream("greedy", order, delivery, again=True).add()
    FakeStream("greedy", order, delivery, again=True).add()
    FakeStream("other", order, delivery).add()
    delivery.deliver_collected()
    assert order == ["greedy", "other", "greedy"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2)), max_size=300))
def test_a_turn_has_so_many_rows_and_tenants_alternate(rows: list[tuple[str, int]]) -> None:
    line = RowQueue()
    for number, (tenant, worker) in enumerate(rows):
        row = cast("TokenRow", (tenant, number))
        line.add(tenant, cast("Worker", worker), [row])
    taken: list[tuple[str, int]] = []
    waiting = {tenant: sum(t == tenant for t, _ in rows) for tenant in "abc"}
    while turn := line.next_turn():
        of_turn = cast("list[tuple[str, int]]", [row for own in turn.values() for row in own])
        assert len(of_turn) <= ROWS_PER_TURN
        counts = {tenant: sum(t == tenant for t, _ in of_turn) for tenant in "abc"}
        for tenant, count in counts.items():
            assert count == waiting[tenant] or count >= max(counts.values()) - 1
            waiting[tenant] -= count
        has_run_out = any(counts[tenant] and not waiting[tenant] for tenant in "abc")
        assert has_run_out or len(of_turn) == ROWS_PER_TURN
        taken += sorted(of_turn, key=lambda row: row[1])
    assert len(taken) == len(rows)
    assert not any(line.has(cast("Worker", worker)) for worker in range(3))
    for tenant in "abc":
        own = [number for t, number in taken if t == tenant]
        assert own == sorted(own)


class FramesOnce:
    """A connection that delivers some frames once."""

    def __init__(self, *frames: Tokens) -> None:
        self._messages = [[SimpleNamespace(frame=frame) for frame in frames]]

    async def receive_many(self) -> list[SimpleNamespace]:
        if not self._messages:
            await trio.sleep_forever()
        return self._messages.pop()


async def test_a_tenant_with_few_rows_waits_for_no_order_of_those_with_many() -> None:
    frame = Tokens(0, tuple(row_of("few" if n == 90 else "many", n) for n in range(200)))
    did: list[str] = []

    def origin_of(row: TokenRow) -> bytes:
        did.append("ordered")
        return row.request_id

    def take(worker: object, frame: Tokens, now: float) -> None:
        did.extend(tenant_of(row) for row in frame.rows)

    intake = intake_of(take, origin_of)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(intake.run)
        nursery.start_soon(intake.receive, cast("Any", "worker"), cast("Any", FramesOnce(frame)))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert did == ["few", *("ordered",) * 199, *("many",) * 199]


async def test_of_many_frames_a_few_are_taken_before_others_may_run() -> None:
    did = ""

    def take(worker: object, frame: Tokens, now: float) -> None:
        nonlocal did
        did += "x"

    async def run_along() -> None:
        nonlocal did
        while len(did.replace(" ", "")) < 100:
            did += " "
            await trio.lowlevel.checkpoint()

    frames = [Tokens(0, (row_of("many", n),)) for n in range(100)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_along)
        nursery.start_soon(
            intake_of(take).receive, cast("Any", "worker"), cast("Any", FramesOnce(*frames))
        )
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    # The last task of one turn may be the first of the next.
    assert max(map(len, did.split())) <= 2 * INPUTS_AT_ONCE


def intake_of(take: Callable[..., object], origin_of: object = None) -> Intake:
    """Return an intake for a fleet with two tenants and a connection with frames."""
    requests = SimpleNamespace(
        queues=[SimpleNamespace(num_tenants=2)],
        table=SimpleNamespace(tenant_of=tenant_of, origin_of=origin_of),
        note_pause=lambda now: False,
        received=lambda *frame: bool(take(*frame)),
    )
    return Intake(cast("Any", requests), a_delivery(), cast("Any", None))


def row_of(tenant: str, number: int) -> TokenRow:
    return TokenRow(f"{tenant:>8}{number:08}".encode(), 0, 0, 0)


def tenant_of(row: TokenRow) -> str:
    return row.request_id[:8].decode().strip()

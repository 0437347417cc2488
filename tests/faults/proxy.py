"""The fault matrix's proxy between real processes: it forwards ZeroMQ traffic and applies rules to
it.

It listens where a worker's peers connect and dials the worker once per peer, below ZeroMQ: bytes
are split into ZMTP pieces and forwarded unchanged. Broken and refused connections, ZeroMQ's own
pings and back-pressure thus reach the other side as without a proxy; a pair of ZeroMQ sockets in
the middle would hide them.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import trio

from transport.codec import decode_message, encode
from transport.frames import AnyFrame, Hello, Welcome, WorkerHeartbeat

from .processes import Journal
from .rules import Blackout, Fate, Link, Rule, Sighting, Way, turn_a_bit, with_fields
from .zmtp import Kind, NotZmtpError, Piece, Splitter, pack_message

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

F = TypeVar("F", bound=AnyFrame)

MAX_FRAME_BYTES = 64 * 1024 * 1024
READ_BYTES = 256 * 1024
BACKLOG = 64


@dataclass(eq=False)
class Lane:
    """One direction of a connection."""

    way: Way
    sink: trio.SocketStream
    lock: trio.Lock = field(default_factory=trio.Lock)
    swapped: list[bytes] = field(default_factory=list)

    async def put(self, raw: bytes) -> bool:
        """Send whole pieces one after the other; return whether the connection was still open."""
        try:
            async with self.lock:
                await self.sink.send_all(raw)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        return True


class Held(NamedTuple):
    """A frame held by a rule, and its destination."""

    rule: Rule
    link: Link
    lane: Lane
    frame: AnyFrame
    payload: bytes | None
    raw: bytes


@dataclass(eq=False)
class Bridge:
    """One connection through the proxy. `client` is empty until it has sent its name."""

    worker: str
    socket: str
    client: str = ""

    @property
    def link(self) -> Link:
        return Link(self.client, self.worker, self.socket)


@dataclass(frozen=True, slots=True)
class Place:
    """The address where the proxy listens for a worker, and the worker's real one."""

    worker: str
    socket: str
    front: Path
    back: Path


class FrameProxy:
    """All links of one fleet.

    Args:
      places: one per socket that a worker binds.

    Attributes:
      sightings: every frame that arrived.
    """

    def __init__(self, places: list[Place]) -> None:
        self.sightings: Journal[Sighting] = Journal()
        self._places = places
        self._kv_fronts = {
            f"ipc://{place.back}": f"ipc://{place.front}"
            for place in places
            if place.socket == "kv"
        }
        self._rules: list[Rule] = []
        self._blackouts: list[Blackout] = []
        self._held: list[Held] = []
        self._beats: dict[Link, tuple[Lane, WorkerHeartbeat]] = {}
        self._light = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; started once it listens on all addresses."""
        async with trio.open_nursery() as nursery:
            for place in self._places:
                listener = trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM)
                await listener.bind(str(place.front))
                listener.listen(BACKLOG)
                nursery.start_soon(self._accept, place, trio.SocketListener(listener), nursery)
            task_status.started()

    # -- what tests and cells do -----------------------------------------------------------------

    @contextmanager
    def rule(self, rule: Rule) -> Iterator[Rule]:
        """Apply a rule. Held frames are sent only by `release`."""
        self._rules.append(rule)
        try:
            yield rule
        finally:
            self.lift(rule)

    def lift(self, rule: Rule) -> None:
        """Stop applying a rule. Idempotent."""
        if rule in self._rules:
            self._rules.remove(rule)

    async def release(self, rule: Rule) -> int:
        """Lift a rule and send what it held; return how many frames could be sent."""
        self.lift(rule)
        mine = [held for held in self._held if held.rule is rule]
        self._held = [held for held in self._held if held.rule is not rule]
        num_sent = 0
        for _, link, lane, frame, payload, raw in mine:
            if not self._is_dark(link, lane.way):
                # By the rules that apply now.
                num_sent += await self._pass_frame(link, lane, frame, payload, raw)
        return num_sent

    @contextmanager
    def blackout(self, blackout: Blackout) -> Iterator[Blackout]:
        """Block some links. What is lost stays lost."""
        self._blackouts.append(blackout)
        try:
            yield blackout
        finally:
            self._blackouts.remove(blackout)
            self._light.set()
            self._light = trio.Event()

    async def repeat_heartbeats(self, worker: str) -> None:
        """Send a worker's last heartbeat again, rewritten by the current rules."""
        for link, (lane, frame) in tuple(self._beats.items()):
            if link.worker == worker:
                await self._pass_frame(link, lane, frame, None, pack_message([encode(frame)]))

    def describe(self) -> list[str]:
        """Return the active rules with their hits, held frames, and the workers' last
        announcements."""
        lines = [f"blackout {dark}" for dark in self._blackouts]
        lines += [f"rule {rule}" for rule in self._rules]
        for held in self._held:
            is_lifted = "" if held.rule in self._rules else ", by a rule that is lifted"
            lines.append(
                f"kept {type(held.frame).__name__} {held.lane.way.name.lower()} "
                f"{held.link.client}-{held.link.worker}{is_lifted}"
            )
        lines = lines or ["no rule and no blackout"]
        for link, (_, beat) in self._beats.items():
            lines.append(
                f"heartbeat of {link.worker}: progress {beat.progress}, has work: {beat.has_work}, "
                f"waiting tokens {beat.load.waiting_tokens}, "
                f"prompt tokens/s {beat.load.prompt_tokens_per_s:.0f}"
            )
        return lines

    def seen(self, kind: type[F]) -> list[tuple[Sighting, F]]:
        """Return all sightings of one kind of frame since the journal was cleared."""
        return [(s, s.frame) for s in self.sightings.entries if isinstance(s.frame, kind)]

    # -- moving bytes ------------------------------------------------------------------------------

    async def _accept(
        self, place: Place, listener: trio.SocketListener, nursery: trio.Nursery
    ) -> None:
        async with listener:
            while True:
                nursery.start_soon(self._bridge, place, await listener.accept())

    async def _bridge(self, place: Place, client: trio.SocketStream) -> None:
        """Forward one connection until either side ends it."""
        async with client:
            try:
                worker = await trio.open_unix_socket(str(place.back))
            except OSError:
                return  # nothing is bound there: refuse the connection by closing it
            bridge = Bridge(place.worker, place.socket)
            async with worker, trio.open_nursery() as nursery:
                for way, source, sink in (
                    (Way.TO_WORKER, client, worker),
                    (Way.FROM_WORKER, worker, client),
                ):
                    nursery.start_soon(self._pump, bridge, source, Lane(way, sink), nursery)

    async def _pump(
        self, bridge: Bridge, source: trio.SocketStream, lane: Lane, nursery: trio.Nursery
    ) -> None:
        splitter = Splitter()
        try:
            while data := await source.receive_some(READ_BYTES):
                for piece in splitter.feed(data):
                    await self._carry(bridge, lane, piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError, NotZmtpError):
            lane.swapped.clear()
        # While the link is blocked, the end of a connection does not pass either.
        while self._is_dark(bridge.link, lane.way):
            await self._light.wait()
        nursery.cancel_scope.cancel()

    async def _carry(self, bridge: Bridge, lane: Lane, piece: Piece) -> None:
        if piece.kind is not Kind.MESSAGE:
            if not (bridge.client and self._is_dark(bridge.link, lane.way)):
                await lane.put(piece.raw)
            return
        frame, payload = decode_message(piece.parts, MAX_FRAME_BYTES)
        if isinstance(frame, Hello) and not bridge.client:
            bridge.client = frame.peer.name
            if any(self._is_dark(bridge.link, way) for way in Way):
                raise NotZmtpError("a connection through a partition")
        # Before HELLO a connection has no name, so any blackout applies.
        if self._is_dark(bridge.link, lane.way) if bridge.client else self._blackouts:
            return
        data = None if payload is None else bytes(payload)
        await self._pass_frame(bridge.link, lane, frame, data, piece.raw)

    async def _pass_frame(
        self, link: Link, lane: Lane, frame: AnyFrame, payload: bytes | None, raw: bytes
    ) -> bool:
        """Apply the rules to a frame; return False if its connection is gone."""
        if isinstance(frame, WorkerHeartbeat):
            self._beats[link] = (lane, frame)
        if isinstance(frame, Welcome) and frame.kv_address in self._kv_fronts:
            frame = with_fields(frame, kv_address=self._kv_fronts[frame.kv_address])
            raw = pack_message([encode(frame)])
        rule = next((r for r in self._rules if r.takes(link, lane.way, frame)), None)
        fate = Fate.PASS if rule is None else rule.fate
        if fate is Fate.SWAP and lane.swapped:
            fate = Fate.PASS  # the frame that the held one is swapped with
        if rule is not None and rule.rewrite is not None:
            frame = rule.rewrite(frame)
            raw = pack_message([encode(frame)])
        if fate is Fate.CORRUPT and payload is not None:
            raw = pack_message([encode(frame), turn_a_bit(payload)])
        self.sightings.add(Sighting(time.monotonic(), link, lane.way, frame, fate))
        if rule is not None and fate in (Fate.HOLD, Fate.ECHO):
            self._held.append(Held(rule, link, lane, frame, payload, raw))
        if fate is Fate.SWAP:
            lane.swapped.append(raw)
        if fate in (Fate.DROP, Fate.HOLD, Fate.SWAP):
            return True
        late, lane.swapped = lane.swapped, []
        copies = 2 if fate is Fate.DOUBLE else 1
        for piece in (*[raw] * copies, *late):
            if not await lane.put(piece):
                return False
        return True

    def _is_dark(self, link: Link, way: Way) -> bool:
        return any(blackout.takes(link, way) for blackout in self._blackouts)

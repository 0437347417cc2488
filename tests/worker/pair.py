"""A prefill and a decode core connected for tests, without Trio: the network is lists, and the test
sets the clock.

The test decides everything that may go wrong: which frame is delivered next, twice, never or
damaged, and whether a step returns, fails, or is still running.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from decode.core import DecodeCore
from decode.drafts import Drafts
from prefill.core import PrefillCore
from transport.digest import kv_key
from transport.frames import (
    AttemptRow,
    CreditRow,
    End,
    Ended,
    EndReason,
    FirstToken,
    Goodbye,
    Grant,
    KvTarget,
    Peer,
    Prefill,
    Refuse,
    Reserve,
    ServerHeartbeat,
    TokenCredit,
    Tokens,
    Welcome,
    WorkerHeartbeat,
)
from transport.handshake import make_hello
from transport.tokens import pack_tokens
from triolet.config import OFF, LinkConfig
from triolet.fair_lru import ANYBODY, Keeper
from triolet.ids import AttemptKey, PeerId, Role
from triolet.invariants import check_at_rest, check_invariants
from triolet.sampling import SamplingParams
from worker.identity import Identity

from .audits import fleet_of
from .scripts import BYTES_PER_BLOCK, completion, scripted_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from decode.speculation import GuessSource
    from simulation.engine import ScriptedEngine
    from transport.frames import AnyFrame
    from triolet.audit import FleetAudit
    from triolet.config import SpeculationConfig
    from worker.worker_loop import WorkerCore

LINK = LinkConfig(kv_chunk_bytes=32, kv_window_bytes=64, kv_ring_bytes=128)
"""Two blocks of the scripted engine per chunk, two chunks under way, four in the ring."""
SERVER = PeerId(Role.SERVER, "server-0", 1)
KV_SECRET = bytes(range(32))


@dataclass(slots=True)
class Parcel:
    """A frame under way."""

    deliver: Callable[[AnyFrame, bytes | memoryview | None], None]
    frame: AnyFrame
    payload: bytes | memoryview | None = None


@dataclass(slots=True)
class Heard:
    """Everything that the server received about one attempt."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_replayed: int
    tokens: dict[int, int] = field(default_factory=dict)
    granted: bool = False
    held_blocks: int = 0
    first: FirstToken | None = None
    is_local: bool = False
    refused: Refuse | None = None
    ended: dict[Role, Ended] = field(default_factory=dict)


class Node:
    """One worker: core, engine, and the running step of its device."""

    def __init__(
        self, core: WorkerCore, engine: ScriptedEngine, drafts: Drafts | None = None
    ) -> None:
        self.core = core
        self.drafts = drafts
        self.engine = engine
        self.rows: list[object] = []

    def begin_step(self, now: float) -> None:
        """Begin a step, if the device is idle and there is something to compute."""
        if not self.rows:
            if self.drafts is not None and isinstance(self.core, DecodeCore):
                rows = self.drafts.plan(self.core.stepper.wanted_guesses())
                if rows:
                    self.drafts.complete(self.drafts.compute(rows))
            has_work = self.core.stepper.has_work
            self.rows = list(self.core.stepper.plan(now))
            assert has_work or not self.rows, "a loop would have slept through this step"

    def finish_step(self, now: float, *, fails: bool = False) -> None:
        """End the running step."""
        rows, self.rows = self.rows, []
        if not rows:
            return
        results = self.engine.step(rows)  # type: ignore[arg-type]
        if fails:
            self.core.stepper.fail("the device was told to fail", now)
        else:
            self.core.stepper.complete(results, now)


class Pair:
    """Two cores, one server, and the frames under way between them."""

    def __init__(
        self,
        num_blocks: int = 24,
        max_num_seqs: int = 4,
        link: LinkConfig = LINK,
        source: GuessSource | None = None,
        speculation: SpeculationConfig = OFF,
        host_blocks: int = 0,
    ) -> None:
        self.now = 100.0
        self.wire: list[Parcel] = []
        self.heard: dict[AttemptKey, Heard] = {}
        self.live: set[AttemptKey] = set()
        self.beats: dict[Role, WorkerHeartbeat] = {}
        self._numbers = count(1)
        self._dialled: set[KvTarget] = set()
        epochs = count(1000)
        p_engine, d_engine = (
            scripted_engine(num_blocks, host_bytes=host_blocks * BYTES_PER_BLOCK) for _ in range(2)
        )
        self.p_identity = Identity(
            Role.PREFILL,
            "prefill-0",
            p_engine,
            max_num_seqs=max_num_seqs,
            max_waiting_tokens=200,
            draw_epoch=lambda: next(epochs),
        )
        self.d_identity = Identity(
            Role.DECODE,
            "decode-0",
            d_engine,
            max_num_seqs=max_num_seqs,
            kv_window_bytes=link.kv_window_bytes,
            kv_address="ipc:///kv",
            draw_epoch=lambda: next(epochs),
        )
        ring = memoryview(bytearray(link.kv_ring_bytes))
        self.prefill = PrefillCore(p_engine, self.p_identity, link, ring, self.now)
        self.decode = DecodeCore(
            d_engine,
            self.d_identity,
            link,
            self.now,
            source=source,
            speculation=speculation,
        )
        self.nodes = {
            Role.PREFILL: Node(self.prefill, p_engine),
            Role.DECODE: Node(
                self.decode, d_engine, source if isinstance(source, Drafts) else None
            ),
        }
        for role in self.nodes:
            self.to_worker(role, make_hello(SERVER))

    @property
    def target(self) -> KvTarget:
        """The present target of KV."""
        return KvTarget(Peer.of(self.d_identity.me), "ipc:///kv")

    def to_worker(self, role: Role, frame: AnyFrame) -> None:
        """Deliver a server's frame at once."""
        core = self.nodes[role].core
        core.wake(self.now)
        core.on_control(SERVER.identity(), frame, self.now)
        self.settle()

    def new_key(self) -> AttemptKey:
        return AttemptKey(next(self._numbers).to_bytes(16, "big"), 0)

    def ask(
        self,
        prompt: Sequence[int],
        *,
        key: AttemptKey | None = None,
        replay: Sequence[int] = (),
        allowed: int = 1_000,
        priority: int = 0,
        remaining_s: float = 60.0,
        salt: bytes = b"",
        local_tokens: int = 0,
        fork_of: AttemptKey | None = None,
        keeper: Keeper = ANYBODY,
        weight: float = 1.0,
        adapter: bytes = b"",
        **sampling: object,
    ) -> AttemptKey:
        """Send RESERVE, and PREFILL if that is granted and decode does not compute the prompt."""
        key = self.new_key() if key is None else key
        params = SamplingParams(**{"max_tokens": 6, "seed": 3, **sampling})  # type: ignore[arg-type]
        self.heard[key] = Heard(tuple(prompt), params, len(replay))
        self.live.add(key)
        packed = pack_tokens(prompt)
        shared = (params, priority, allowed, remaining_s)
        reserve = Reserve(
            *key,
            packed,
            pack_tokens(replay),
            *shared,
            salt=salt,
            local_tokens=local_tokens,
            fork_of=None if fork_of is None else AttemptRow(*fork_of),
            tenant=keeper.tenant,
            cache_share=keeper.share,
            weight=weight,
            kv_key=kv_key(KV_SECRET, key),
            adapter=adapter,
        )
        self.to_worker(Role.DECODE, reserve)
        if self.heard[key].is_local:
            return key
        if self.heard[key].granted:
            held_blocks = self.heard[key].held_blocks
            shared = (params, priority, remaining_s, held_blocks)
            kv = kv_key(KV_SECRET, key)
            frame = Prefill(*key, packed, self.target, *shared, (), salt, *keeper, kv, adapter)
            self.to_worker(Role.PREFILL, frame)
        else:
            self.live.discard(key)
        return key

    def end(self, key: AttemptKey, reason: EndReason = EndReason.CANCEL) -> None:
        """Send END to both."""
        self.live.discard(key)
        for role in self._asked(key):
            self.to_worker(role, End(*key, reason))

    def _asked(self, key: AttemptKey) -> tuple[Role, ...]:
        """Return the servers that know of an attempt."""
        return (Role.DECODE,) if self.heard[key].is_local else tuple(self.nodes)

    def allow(self, key: AttemptKey, allowed: int, received: int = 0) -> None:
        self.to_worker(Role.DECODE, TokenCredit((CreditRow(*key, allowed, received),)))

    def beat(self) -> None:
        """Send heartbeats in both directions."""
        for role in self.nodes:
            wanted = (
                key
                for key in sorted(self.live)
                if role in self._asked(key) and role not in self.heard[key].ended
            )
            rows = tuple(AttemptRow(*key) for key in wanted)
            self.to_worker(role, ServerHeartbeat(SERVER.epoch, rows))
            self.nodes[role].core.server_sessions.beat()
        self.settle()

    def pass_time(self, seconds: float, *, beats: bool = True) -> None:
        """Advance the clock in steps shorter than a heartbeat."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 0.25)
            self.sweep()
            if beats:
                self.beat()

    def sweep(self) -> None:
        for node in self.nodes.values():
            node.core.wake(self.now)
            node.core.sweep(self.now)
        self.settle()

    def deliver(self, index: int = 0, *, keep: bool = False, damage: bool = False) -> None:
        """Deliver one frame."""
        parcel = self.wire[index] if keep else self.wire.pop(index)
        payload = parcel.payload
        if damage and payload is not None:
            payload = bytes([payload[0] ^ 1]) + bytes(payload[1:])
        parcel.deliver(parcel.frame, payload)
        self.settle()

    def run(self, max_rounds: int = 500) -> None:
        """Run everything in order until nothing is left to do."""
        for _ in range(max_rounds):
            while self.wire:
                self.deliver()
            for node in self.nodes.values():
                node.begin_step(self.now)
            self.settle()
            if not any(node.rows for node in self.nodes.values()) and not self.wire:
                return
            for node in self.nodes.values():
                node.finish_step(self.now)
            self.settle()
        raise AssertionError("it does not come to rest")

    def settle(self) -> None:
        """Put the cores' frames on the wire; the server receives its own at once."""
        sends = list(self.prefill.take_kv_sends(self.now))
        self._dial()
        for send in sends:
            # A copy, as on any wire: the ring is used again.
            payload = None if send.payload is None else bytes(send.payload)
            self.wire.append(Parcel(self._to_decode, send.frame, payload))
        for send in self.decode.outbox.take_for_senders():
            self.wire.append(Parcel(self._to_prefill, send.frame))
        for role, node in self.nodes.items():
            for send in node.core.outbox.take_for_servers():
                if send.to == SERVER.identity():
                    self._hear(role, send.frame)

    def audit(self) -> FleetAudit:
        """Return both workers' accounts."""
        return fleet_of(self.prefill.account(self.now), self.decode.account(self.now))

    def check(self) -> None:
        """Assert what must hold after every event."""
        assert check_invariants(self.audit()) == []
        for key, heard in self.heard.items():
            wanted = completion(heard.prompt, heard.sampling.seed, heard.sampling.max_tokens)
            for position, token_id in heard.tokens.items():
                assert token_id == wanted[position], f"{key} position {position}"

    def check_empty(self) -> None:
        """Assert that nothing is held."""
        self.check()
        assert check_at_rest(self.audit()) == []
        assert self.prefill.attempt_table.is_empty
        assert self.decode.attempt_table.is_empty
        shipper = self.prefill.shipper
        assert all(shipper.is_idle(target) for target in shipper.targets)

    def _dial(self) -> None:
        wanted = self.prefill.shipper.targets
        for target in wanted:
            if target not in self._dialled:
                hello = make_hello(self.p_identity.me, self.p_identity.fingerprint)
                self.wire.append(Parcel(self._to_decode, hello))
        self._dialled = set(wanted)

    def _to_decode(self, frame: AnyFrame, payload: bytes | memoryview | None) -> None:
        sender = self.p_identity.me.identity()
        self.decode.wake(self.now)
        self.decode.on_kv(sender, frame, payload, self.now)

    def _to_prefill(self, frame: AnyFrame, payload: bytes | memoryview | None) -> None:
        assert payload is None
        self.prefill.wake(self.now)
        for target in self.prefill.shipper.targets:
            match frame:
                case Welcome(peer=peer) if peer != target.peer:
                    self.prefill.on_target_lost(target, "another life", self.now)
                case Welcome(capacity=capacity):
                    self.prefill.shipper.open_peer(target, capacity.kv_window_bytes, self.now)
                case Goodbye(reason=reason):
                    self.prefill.on_target_lost(target, reason, self.now)
                case _:
                    self.prefill.on_kv(target, frame, self.now)

    def _hear(self, role: Role, frame: AnyFrame) -> None:
        match frame:
            case Grant():
                self.heard[frame.key].granted = True
                self.heard[frame.key].held_blocks = frame.held_blocks
                self.heard[frame.key].is_local = frame.is_local
            case Refuse():
                self.heard[frame.key].refused = frame
            case FirstToken(row=row):
                self.heard[frame.key].first = frame
                self._hear_token(row.key, row.position, row.token_id)
            case Tokens(rows=rows):
                for row in rows:
                    self._hear_token(row.key, row.position, row.token_id)
            case Ended():
                known = self.heard[frame.key].ended.setdefault(role, frame)
                assert known == frame, "an attempt ended twice, in different words"
            case WorkerHeartbeat():
                self.beats[role] = frame
            case Goodbye():
                self.to_worker(role, make_hello(SERVER))
            case _:
                assert isinstance(frame, Welcome), frame

    def _hear_token(self, key: AttemptKey, position: int, token_id: int) -> None:
        tokens = self.heard[key].tokens
        assert tokens.setdefault(position, token_id) == token_id

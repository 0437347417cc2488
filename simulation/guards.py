"""Remove guards of the protocol temporarily, to test that the simulator notices.

The product has no switch for this; functions are replaced within this process. If a missing guard
goes unnoticed, the simulator lacks a check.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

import decode.assembly
import server.scheduling.attempt
import server.scheduling.frames
import server.scheduling.routing
from decode.intake import KvIntake
from decode.speculation import GuessTurn
from engine.block_ledger import BlockLedger
from engine.prefix_cache import TOKEN_BYTES, PrefixCache
from prefill.links import KvLinks
from prefill.shipper import PeerSender
from server.scheduling.attempt import Attempts
from server.scheduling.frames import Finish
from server.scheduling.poison import PoisonDetector
from server.scheduling.recovery import ZoneBreakers
from server.scheduling.request import Step
from server.scheduling.requests import Requests
from server.scheduling.roster import Roster
from server.scheduling.workers import Worker
from transport.frames import EndReason, Peer
from transport.gate import Credential
from transport.lease import LeaseTable
from transport.liveness import PeerMonitor, SelfFence
from transport.memory_network import MemoryConnection, MemoryListener
from triolet.ids import PeerId, Role
from triolet.service_class import Placement
from worker.attempt_table import AttemptTable
from worker.server_sessions import PeerTable, _Known

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from decode.attempt import DecodeAttempt as DecodeAttempt
    from engine.prefix_cache import Leased
    from server.scheduling.frames import Change
    from server.scheduling.request import Attempt, Request
    from server.scheduling.roster import WorkerPool
    from server.scheduling.routing import Need
    from transport.frames import Grant, KvChunk, KvTarget, TokenRow, Welcome
    from transport.memory_pipe import Pipe
    from triolet.ids import AttemptKey


class Exchange(NamedTuple):
    """A function and its replacement without the guard."""

    owner: object
    name: str
    new: object


class _Anything:
    """An object that equals everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def lease_expiry() -> list[Exchange]:
    """Leases last until their request's deadline, also without heartbeats."""

    def expired(self: LeaseTable, now: float) -> list[tuple[AttemptKey, EndReason]]:
        return [(lease.key, EndReason.DEADLINE) for lease in self.leases() if lease.deadline <= now]

    return [Exchange(LeaseTable, "expired", expired)]


def digest() -> list[Exchange]:
    """Chunks are accepted without a check of their digests."""
    return [Exchange(decode.assembly, "payload_digest", lambda _: _Anything())]


def positions() -> list[Exchange]:
    """Rows are passed on in order of arrival, whatever their positions."""

    def take_row(request: Request, attempt: Attempt, row: TokenRow, now: float) -> Change | None:
        del attempt
        position = len(request.relay.token_ids)
        request.step(Step.TOKEN)
        end = request.relay.push(msgspec.structs.replace(row, position=position), now)
        return None if end is None else Finish(end)

    return [
        Exchange(server.scheduling.frames, "take_row", take_row),
        Exchange(server.scheduling.attempt, "take_row", take_row),
    ]


def live_lease() -> list[Exchange]:
    """KV is written to the attempt's former blocks, as with remote memory access."""
    on_chunk = KvIntake.on_chunk
    blocks: dict[AttemptKey, list[int]] = {}

    def write(
        self: KvIntake, sender: bytes, chunk: KvChunk, payload: bytes | memoryview, now: float
    ) -> None:
        attempt: DecodeAttempt | None = self._attempt_table.attempts.get(chunk.key)
        if attempt is not None:
            blocks[chunk.key] = attempt.block_table
        elif chunk.key in blocks:
            end = chunk.first_block + chunk.num_blocks
            self._engine.import_blocks(blocks[chunk.key][chunk.first_block : end], payload)
        on_chunk(self, sender, chunk, payload, now)

    return [Exchange(KvIntake, "on_chunk", write)]


def running_step() -> list[Exchange]:
    """Blocks are freed immediately, even while the device uses them."""

    def begin_step(self: AttemptTable[DecodeAttempt], keys: Iterable[AttemptKey]) -> None:
        del self, keys

    return [Exchange(AttemptTable, "begin_step", begin_step)]


def epochs() -> list[Exchange]:
    """Epochs of a process are not distinguished."""
    wanted, granted = KvIntake._wanted, Attempts._granted
    heartbeat, on_welcome = PeerMonitor.heartbeat, KvLinks._on_welcome

    def take_any(
        self: KvIntake, sender: bytes, key: AttemptKey, target_epoch: int
    ) -> DecodeAttempt | None:
        del target_epoch
        return wanted(self, sender, key, self._identity.me.epoch)

    def grant_any(
        self: Attempts, request: Request, attempt: Attempt, grant: Grant, now: float
    ) -> None:
        epoch = attempt.pair.decode.monitor.epoch
        granted(self, request, attempt, msgspec.structs.replace(grant, epoch=epoch), now)

    def hear_any(
        self: PeerMonitor, epoch: int, now: float, *, progress: int = 0, has_work: bool = False
    ) -> bool:
        return heartbeat(self, self.epoch or epoch, now, progress=progress, has_work=has_work)

    def welcome_any(self: KvLinks, target: KvTarget, welcome: Welcome, now: float) -> None:
        peer = Peer(target.peer.role, target.peer.name, target.peer.epoch)
        on_welcome(self, target, msgspec.structs.replace(welcome, peer=peer), now)

    def welcomed(self: Requests, worker: Worker, welcome: Welcome, now: float) -> None:
        worker.welcomed(welcome, now)
        self._observer.worker_joined(str(worker))

    return [
        Exchange(KvIntake, "_wanted", take_any),
        Exchange(Attempts, "_granted", grant_any),
        Exchange(PeerMonitor, "heartbeat", hear_any),
        Exchange(KvLinks, "_on_welcome", welcome_any),
        Exchange(Requests, "welcomed", welcomed),
    ]


def living_processes() -> list[Exchange]:
    """A worker that was considered dead stays dead, even if it answers in the same epoch."""
    settle = PoisonDetector.settle
    return [
        Exchange(
            PoisonDetector, "settle", lambda one, life, has_died: settle(one, life, has_died=True)
        )
    ]


def tombstones() -> list[Exchange]:
    """Ended attempts leave no tombstones."""

    def bury(self: LeaseTable, key: AttemptKey, now: float) -> None:
        del self, key, now

    return [Exchange(LeaseTable, "_bury", bury)]


def self_fence() -> list[Exchange]:
    """A process that was stopped continues without fencing itself."""

    def beat(self: SelfFence, now: float) -> bool:
        self._beat_at = now
        return False

    return [Exchange(SelfFence, "beat", beat)]


def renewal_by_name() -> list[Exchange]:
    """A heartbeat renews all leases of its server, not only the named ones."""
    renew = LeaseTable.renew

    def renew_all(
        self: LeaseTable, server: PeerId, named: Iterable[AttemptKey], now: float
    ) -> list[AttemptKey]:
        renew(self, server, self.owned_by(server), now)
        return renew(self, server, named, now)

    return [Exchange(LeaseTable, "renew", renew_all)]


def end() -> list[Exchange]:
    """Workers are not notified of the end of an attempt."""

    def release_attempt(self: Attempts, request: Request, reason: EndReason) -> None:
        del self, reason
        attempt, request.attempt = request.attempt, None
        if attempt is not None:
            for worker in attempt.pair:
                worker.release(attempt.key)

    return [Exchange(Attempts, "release_attempt", release_attempt)]


def greetings() -> list[Exchange]:
    """A worker accepts the first name of a connection, and frames of connections without a HELLO to
    its epoch."""
    hear, attach = PeerTable.hear, MemoryListener.attach

    def hear_strangers(self: PeerTable, sender: bytes, now: float) -> PeerId | None:
        if sender not in self._known:
            self._known[sender] = _Known(_named(sender), now)
        return hear(self, sender, now)

    def attach_by_name(self: MemoryListener, number: bytes, incoming: Pipe, outgoing: Pipe) -> None:
        attach(self, number, incoming, outgoing)
        self._gate._names.claim(number, _named(incoming._link[1]), Credential.parse(b""))

    return [
        Exchange(PeerTable, "hear", hear_strangers),
        Exchange(MemoryListener, "attach", attach_by_name),
    ]


def broken_links() -> list[Exchange]:
    """Broken connections are not reported, so a restarted process at an address goes unnoticed."""

    async def wait_for_ever(self: MemoryConnection) -> None:
        del self
        await trio.sleep_forever()

    return [Exchange(MemoryConnection, "wait_broken", wait_for_ever)]


def _named(identity: bytes) -> PeerId:
    role, name, epoch = identity.decode().split(":")
    return PeerId(Role(role), name, int(epoch, 16))


def gaps() -> list[Exchange]:
    """A missing token goes unnoticed."""
    settle = server.scheduling.frames._settle

    def forget(request: Request, attempt: Attempt, now: float) -> Change | None:
        change = settle(request, attempt, now)
        attempt.gap_since = None
        return change

    return [Exchange(server.scheduling.frames, "_settle", forget)]


def stalled_receivers() -> list[Exchange]:
    """Prefill waits forever for a decode worker that does not answer."""
    return [Exchange(PeerSender, "is_stalled", lambda _, now: False)]


def word_of_the_unknown() -> list[Exchange]:
    """A server is not notified that an attempt in its heartbeat is unknown."""

    def renew(
        self: AttemptTable[DecodeAttempt],
        server: PeerId,
        named: Iterable[AttemptKey],
        now: float,
    ) -> None:
        self.leases.renew(server, named, now)

    return [Exchange(AttemptTable, "renew", renew)]


def reference_counts() -> list[Exchange]:
    """Shared blocks are freed with the first lease that ends."""
    release = BlockLedger.release

    def release_all(self: BlockLedger, owner: Hashable) -> int:
        for block in self._leases.get(owner, ()):
            self._references[block] = 1
        return release(self, owner)

    return [Exchange(BlockLedger, "release", release_all)]


def tokens_of_a_hit() -> list[Exchange]:
    """A cached block is found by its first token alone."""
    keys = PrefixCache._keys

    def first_tokens(self: PrefixCache, tokens: bytes) -> Iterator[bytes]:
        return (key[:TOKEN_BYTES] for key in keys(self, tokens))

    return [Exchange(PrefixCache, "_keys", first_tokens)]


def finished_kv() -> list[Exchange]:
    """Blocks are in the prefix cache as soon as they are leased, even if not computed."""
    lease = PrefixCache.lease

    def lease_and_insert(
        self: PrefixCache, owner: Hashable, tokens: bytes, salt: bytes, num_blocks: int
    ) -> Leased:
        leased = lease(self, owner, tokens, salt, num_blocks)
        self.insert(tokens, salt, leased.blocks[: len(tokens) // self._key_bytes])
        return leased

    return [Exchange(PrefixCache, "lease", lease_and_insert)]


def right_guesses() -> list[Exchange]:
    """Tokens computed after a guess are kept even if the guess was wrong."""
    return [Exchange(GuessTurn, "holds", lambda turn, index, token_id: index < len(turn.guesses))]


def bound_zones() -> list[Exchange]:
    """A tenant's zones are ignored."""
    return [Exchange(Placement, "admits", lambda *_, **__: True)]


def half_of_a_pool() -> list[Exchange]:
    """Breakers and zones may leave out every worker."""
    return [
        Exchange(
            server.scheduling.routing,
            "ejected",
            lambda pool: [one for one in pool if not one.breaker.is_whole],
        )
    ]


def zone_breakers() -> list[Exchange]:
    """A zone that was silent gets all of its work at once."""
    return [Exchange(ZoneBreakers, "advance", lambda _, now: None)]


def zone_shares() -> list[Exchange]:
    """A zone that returns is not confined to its share."""
    return [Exchange(Worker, "has_share_left", property(lambda one: one.breaker.is_admitting))]


def roster_changes() -> list[Exchange]:
    """The list of workers for a placement is not rebuilt when a worker joins or reports its
    zone."""
    return [Exchange(Roster, "changed", lambda _: None)]


def restricted_candidates() -> list[Exchange]:
    """Workers are drawn even if their breaker or zone allows no further attempt."""

    def draw(self: Roster, pool: WorkerPool, need: Need) -> list[Worker]:
        return [one for role in pool.of_role for one in self._some(role, [], pool, need)]

    return [Exchange(Roster, "candidates", draw)]


GUARDS: Final[dict[str, Callable[[], list[Exchange]]]] = {
    "lease expiry": lease_expiry,
    "digest": digest,
    "positions": positions,
    "live lease": live_lease,
    "running step": running_step,
    "epochs": epochs,
    "living processes": living_processes,
    "tombstones": tombstones,
    "self-fence": self_fence,
    "renewal by name": renewal_by_name,
    "END": end,
    "gaps": gaps,
    "greetings": greetings,
    "broken links": broken_links,
    "stalled receivers": stalled_receivers,
    "word of the unknown": word_of_the_unknown,
    "reference counts": reference_counts,
    "tokens of a hit": tokens_of_a_hit,
    "finished KV": finished_kv,
    "right guesses": right_guesses,
    "bound zones": bound_zones,
    "half of a pool": half_of_a_pool,
    "zone breakers": zone_breakers,
    "zone shares": zone_shares,
    "roster changes": roster_changes,
    "restricted candidates": restricted_candidates,
}


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Remove guards within this block."""
    with ExitStack() as stack:
        for name in names:
            for exchange in GUARDS[name]():
                stack.enter_context(_exchanged(*exchange))
        yield


@contextmanager
def _exchanged(owner: object, name: str, new: object) -> Iterator[None]:
    """Replace an existing function with `new`."""
    old = vars(owner)[name]
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)

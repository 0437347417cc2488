"""The decode worker's state machine: frames and step results in, frames and step plans out. No I/O.

`SharedMemoryReceiver` answers prefill workers that offer shared memory for KV;
transport/shared_ring.py finds and maps such memory.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import msgspec
import structlog

from engine.batch import check_request
from transport.digest import KV_KEY_BYTES
from transport.frames import (
    Goodbye,
    Grant,
    Hello,
    KvChunk,
    KvManifest,
    Load,
    Refuse,
    RefuseReason,
    Reserve,
    TokenCredit,
    WorkerHeartbeat,
    frame_name,
)
from transport.handshake import goodbye
from transport.lease import DECODE_TRANSITIONS, LeaseState, Standing
from transport.shared_ring import NotSharedError
from transport.tokens import unpack_tokens
from transport.window import TokenWindow
from triolet.audit import ProcessFacts
from triolet.config import OFF, MemorySharing
from triolet.errors import RemoteProtocolError, RequestError
from triolet.fair_lru import Keeper
from triolet.ids import Role
from worker.account import cache_load, worker_account
from worker.attempt_table import AttemptTable
from worker.counters import Counters, Drop
from worker.engine_port import require_adapter
from worker.outbox import Outbox
from worker.server_sessions import PeerTable, ServerSessions

from .assembly import Assembly
from .attempt import DecodeAttempt
from .intake import KvIntake
from .prompts import keep_completion, num_shared_blocks
from .scheduler import blocks_for
from .speculation import Speculation
from .stepper import DecodeStepper

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from transport.frames import AnyFrame, SharedRange, Welcome
    from transport.shared_ring import PeerRings
    from triolet.audit import WorkerAudit
    from triolet.config import LinkConfig, SpeculationConfig
    from triolet.ids import PeerId
    from worker.engine_port import EnginePort
    from worker.identity import Identity

    from .speculation import GuessSource


log = structlog.get_logger()


class SharedMemoryReceiver:
    """The rings of prefill workers that are read here.

    Args:
      rings: finds and keeps them; None if there are none.
      mode: whether shared memory is wanted.
    """

    def __init__(self, rings: PeerRings | None, mode: MemorySharing) -> None:
        self._rings = None if mode is MemorySharing.OFF else rings
        self._mode = mode

    def welcome(self, sender: bytes, hello: Hello, welcome: Welcome) -> Welcome | Goodbye:
        """Return the answer to a sender that may connect, after handling its offer.

        Returns:
          A GOODBYE if shared memory is required and not possible.
        """
        why = self._attach(sender, hello)
        name = hello.peer.name
        if why is None:
            log.info("kv_path", sender=name, path="memory", why="its ring is mapped here")
            return msgspec.structs.replace(welcome, shares_ring=True)
        if self._mode is MemorySharing.ON:
            me = welcome.peer.peer_id
            return goodbye(f"{me} takes KV only from shared memory (share_kv_memory), but {why}")
        log.info("kv_path", sender=name, path="socket", why=why)
        return welcome

    def read(self, sender: bytes, where: SharedRange) -> memoryview | None:
        """Return a copy of bytes in a sender's ring. See PeerRings.read."""
        return None if self._rings is None else self._rings.read(sender, where)

    def keep_only(self, senders: Collection[bytes]) -> None:
        """Unmap the rings of all other senders and of dead owners."""
        if self._rings is not None:
            self._rings.keep_only(senders)

    def _attach(self, sender: bytes, hello: Hello) -> str | None:
        """Map the ring that a HELLO offers; return why that failed, or None."""
        if self._rings is None:
            return "share_kv_memory is off here"
        if hello.ring is None:
            self._rings.detach(sender)
            return "it offers no memory: off there, or its system has none"
        try:
            self._rings.attach(sender, hello.ring)
        except NotSharedError as error:
            return str(error)
        return None


_HOLDING = (LeaseState.RESERVED, LeaseState.FILLING, LeaseState.COMPUTING)
_WITH_ROW = (LeaseState.READY, LeaseState.RUNNING)


class DecodeCore:
    """The decisions of one decode worker.

    Args:
      engine: blocks and their bytes.
      identity: identity of this worker.
      link: lifetimes and bounds.
      now: time of the start.
      read_process: returns facts from the operating system; empty by default.
      source: source of guessed tokens; None for no guesses.
      speculation: number of guesses.
      rings: shared memory of senders on this host; None if there is none.

    Attributes:
      outbox: frames to send.
      counters: counters of this worker.
      attempt_table: the attempts with leases.
      server_sessions: sessions with servers; heartbeats and drains.
      stepper: plans steps and processes their results.
    """

    def __init__(
        self,
        engine: EnginePort,
        identity: Identity,
        link: LinkConfig,
        now: float,
        read_process: Callable[[], ProcessFacts] = ProcessFacts,
        source: GuessSource | None = None,
        speculation: SpeculationConfig = OFF,
        rings: PeerRings | None = None,
    ) -> None:
        self.outbox = Outbox()
        self.counters = Counters()
        self._engine = engine
        self._identity = identity
        self._link = link
        self._read_process = read_process
        self._orders = count()
        self.attempt_table: AttemptTable[DecodeAttempt] = AttemptTable(
            engine.ledger, DECODE_TRANSITIONS, link, self.outbox, on_end=self._on_end
        )
        self.server_sessions = ServerSessions(
            identity,
            link,
            self.attempt_table,
            self.outbox,
            self.counters,
            self._describe,
            self.account,
            now,
        )
        self._shared_memory = SharedMemoryReceiver(rings, link.wire.share_memory)
        # Senders close idle links themselves; after twice that time, one was unable to.
        self._senders = PeerTable(
            identity,
            Role.PREFILL,
            silence_s=2 * link.kv_idle_s,
            max_peers=link.max_peers,
            send=self.outbox.to_sender,
            welcome=self._shared_memory.welcome,
        )
        self._speculation = Speculation(source, speculation, self.counters)
        self.stepper = DecodeStepper(
            engine, identity, self.attempt_table, self.outbox, self.counters, self._speculation
        )
        self._intake = KvIntake(
            engine,
            identity,
            link,
            self.attempt_table,
            self.outbox,
            self.counters,
            on_complete=self.stepper.join,
        )

    def wake(self, now: float) -> None:
        """Call this before handing in frames and at every sweep: after a standstill a worker must
        not act on its old state."""
        if self.server_sessions.is_fenced(now):
            self.server_sessions.begin_new_life(now)
            self._senders.dismiss("this worker has a new epoch: connect again")
        elif absence_s := self.server_sessions.excuse():
            self._senders.excuse(absence_s)

    def on_control(self, sender: bytes, frame: AnyFrame, now: float) -> None:
        """Process a frame of a server."""
        server = self.server_sessions.take(sender, frame, now)
        if server is None:
            return
        try:
            match frame:
                case Reserve():
                    self._reserve(server, frame, now)
                case TokenCredit():
                    self._grant_tokens(server, frame)
                case _:
                    raise RemoteProtocolError(f"no {frame_name(frame)} to a decode worker")
        except (RemoteProtocolError, RequestError) as error:
            self.server_sessions.reject(server, frame, error, now)

    def on_kv(
        self, sender: bytes, frame: AnyFrame, payload: bytes | memoryview | None, now: float
    ) -> None:
        """Process a frame of a prefill worker."""
        if isinstance(frame, Hello):
            self._senders.greet(sender, frame, now)
            return
        if isinstance(frame, Goodbye):
            self._senders.forget(sender)
            return
        if self._senders.hear(sender, now) is None:
            self.counters.drop(Drop.STRANGER)
            return
        if isinstance(frame, KvChunk) and frame.shared is not None:
            payload = self._shared_memory.read(sender, frame.shared)
        match frame:
            case KvChunk() if payload is not None:
                self._intake.on_chunk(sender, frame, payload, now)
            case KvManifest():
                self._intake.on_manifest(sender, frame, now)
            case _:
                self.counters.drop(Drop.UNEXPECTED)

    def sweep(self, now: float) -> None:
        """End what is due, and forget silent peers."""
        self.server_sessions.sweep(now)
        self._senders.forget_silent(now)
        self._shared_memory.keep_only({sender for sender, _ in self._senders.known()})

    def say_goodbye(self) -> None:
        """Notify all peers that this worker is leaving."""
        self.server_sessions.say_goodbye()
        self._senders.dismiss("this decode worker has shut down")

    def load(self) -> Load:
        """Return the worker's load."""
        ledger, leases, counters = self._engine.ledger, self.attempt_table.leases, self.counters
        waiting = [lease.key for lease in leases.leases() if lease.state in _HOLDING]
        return Load(
            free_blocks=ledger.free_blocks,
            cached_blocks=ledger.cached_blocks,
            leased_blocks=ledger.leased_blocks,
            running=sum(leases.count(state) for state in _WITH_ROW),
            paused=leases.count(LeaseState.PAUSED),
            waiting=len(waiting),
            waiting_tokens=sum(len(self.attempt_table.attempts[key].prompt_ids) for key in waiting),
            steps=counters.steps,
            computed_tokens=counters.computed_tokens,
            kv_bytes=counters.kv_bytes,
            kv_shared_bytes=counters.kv_shared_bytes,
            stale_frames=counters.stale_frames,
            bad_digests=counters.bad_digests,
            preemptions=counters.preemptions,
            dropped=counters.dropped_by_reason(),
            speculative_rows=counters.speculative_rows,
            speculative_proposed=counters.speculative_proposed,
            speculative_accepted=counters.speculative_accepted,
            cache=cache_load(self._engine.prefix_cache),
            step_s=self.stepper.prompts.rates.step_s,
            prompt_tokens_per_s=self.stepper.prompts.rates.prompt_tokens_per_s,
            local_tokens=self.stepper.prompts.num_tokens,
            local_prompts=counters.local_prompts,
            borrowed_steps=counters.borrowed_steps,
            busy_s=counters.busy_s,
            busy_row_s=counters.busy_row_s,
            chunk_tokens=self.stepper.prompts.rates.chunk_tokens(leases.count(LeaseState.RUNNING)),
        )

    def account(self, now: float) -> WorkerAudit:
        """Return the account for an audit."""
        return worker_account(
            self._identity,
            self._link,
            self._engine.prefix_cache,
            self.attempt_table,
            self.counters,
            now,
            is_draining=self.server_sessions.is_draining,
            allowed=lambda key: self.attempt_table.attempts[key].window.allowed,
            process=self._read_process(),
            draft=self._speculation.ledger,
        )

    def _describe(self, server: PeerId) -> WorkerHeartbeat:
        own = len(self.attempt_table.leases.owned_by(server))
        num_servers = max(1, len(self.server_sessions.servers))
        return WorkerHeartbeat(
            epoch=self._identity.me.epoch,
            progress=self.counters.steps,
            has_work=self.attempt_table.is_stepping,
            is_draining=self.server_sessions.is_draining,
            load=self.load(),
            # Rounded up: one attempt gets the last free row, and a second one is refused.
            row_credit=own - (-self._num_free_rows() // num_servers),
        )

    def _num_free_rows(self) -> int:
        # A paused attempt has no row; if all resume at once they take turns.
        num_rows = len(self.attempt_table.leases) - self.attempt_table.leases.count(
            LeaseState.PAUSED
        )
        return max(0, self._identity.capacity.max_num_seqs - num_rows)

    def _reserve(self, server: PeerId, frame: Reserve, now: float) -> None:
        standing = self.attempt_table.leases.standing(frame.key)
        if standing is Standing.NEW:
            self.attempt_table.end_older(frame.key, now)
            prompt_ids, replay_ids = unpack_tokens(frame.prompt), unpack_tokens(frame.replay)
            check_request(self._engine.vocab_size, prompt_ids + replay_ids, frame.sampling)
            require_adapter(self._engine, frame.adapter, self._identity.me)
            if not prompt_ids:
                raise RemoteProtocolError("a prompt without tokens")
            if self._link.wire.plaintext and len(frame.kv_key) != KV_KEY_BYTES:
                raise RemoteProtocolError(
                    f"{self._identity.me.name} takes KV in plaintext, and this server sends no key "
                    "for its MAC: upgrade the server, or leave link.wire.plaintext off"
                )
            origin = None
            if frame.fork_of is not None:
                origin = self.stepper.forks.origin(
                    frame.fork_of, server, prompt_ids, frame.cache_key
                )
            reason = self._refusal(frame, len(prompt_ids), len(replay_ids), origin)
            if reason is None:
                self._admit(server, frame, prompt_ids, replay_ids, origin, now)
        else:
            known = self.attempt_table.attempts.get(frame.key)
            is_its_own = known is not None and known.server == server
            reason = None if is_its_own else RefuseReason.ENDED
        if reason is None:
            held_blocks = self.attempt_table.attempts[frame.key].num_held_blocks
            is_local = self.attempt_table.attempts[frame.key].is_local
            epoch = self._identity.me.epoch
            answer: Grant | Refuse = Grant(*frame.key, epoch, held_blocks, is_local)
        else:
            answer = Refuse(*frame.key, reason, retry_after_s=self._link.heartbeat_interval_s)
        self.outbox.to_server(server.identity(), answer)

    def _refusal(
        self,
        frame: Reserve,
        num_prompt_tokens: int,
        num_replay_tokens: int,
        origin: DecodeAttempt | None,
    ) -> RefuseReason | None:
        if self.server_sessions.is_draining:
            return RefuseReason.DRAINING
        num_tokens = num_prompt_tokens + max(1, num_replay_tokens)
        if num_tokens > self._identity.capacity.max_model_len:
            return RefuseReason.TOO_LONG
        if frame.fork_of is not None and origin is None:
            return RefuseReason.NO_FORK
        if self._num_free_rows() == 0:
            return RefuseReason.NO_ROWS
        # Every attempt here may soon need another block: a new prompt must not cause a preemption.
        growth_blocks = len(self.attempt_table.leases)
        num_blocks = blocks_for(num_prompt_tokens + num_replay_tokens, self._engine.block_size)
        if origin is not None:
            num_shared = num_shared_blocks(num_prompt_tokens, self._engine.block_size)
            needed_blocks = num_blocks - num_shared
        else:
            prospect = self._engine.prefix_cache.prospect(frame.prompt, frame.cache_key, num_blocks)
            needed_blocks = prospect.num_needed_blocks
        if needed_blocks + growth_blocks > self._engine.ledger.available_blocks:
            return RefuseReason.NO_BLOCKS
        return None

    def _admit(
        self,
        server: PeerId,
        frame: Reserve,
        prompt_ids: tuple[int, ...],
        replay_ids: tuple[int, ...],
        origin: DecodeAttempt | None,
        now: float,
    ) -> None:
        block_size = self._engine.block_size
        # Include the replay's blocks: the next step would need them anyway.
        num_blocks = blocks_for(len(prompt_ids) + len(replay_ids), block_size)
        if origin is None:
            blocks, num_held_blocks = self._engine.prefix_cache.lease(
                frame.key, frame.prompt, frame.cache_key, num_blocks
            )
        else:
            # Only blocks that it writes itself: the origin's are not complete yet.
            num_held_blocks = num_shared_blocks(len(prompt_ids), block_size)
            blocks = self._engine.ledger.lease(frame.key, num_blocks - num_held_blocks)
        num_held_tokens = num_held_blocks * block_size
        is_local = origin is not None or len(prompt_ids) - num_held_tokens <= frame.local_tokens
        attempt = DecodeAttempt(
            key=frame.key,
            server=server,
            prompt_ids=prompt_ids,
            replay_ids=replay_ids,
            sampling=frame.sampling,
            eos_token_ids=frame.eos_token_ids,
            priority=frame.priority,
            order=next(self._orders),
            window=TokenWindow(frame.allowed),
            assembly=Assembly(
                first_block=num_held_blocks,
                num_blocks=blocks_for(len(prompt_ids), block_size),
                num_tokens=len(prompt_ids),
                bytes_per_block=self._engine.bytes_per_block,
            ),
            block_table=blocks,
            output_ids=[],
            cache_key=frame.cache_key,
            num_held_blocks=num_held_blocks,
            is_local=is_local,
            num_computed_tokens=num_held_tokens if is_local and origin is None else 0,
            keeper=Keeper(frame.tenant, frame.cache_share),
            weight=frame.weight,
            constraint=self._engine.constrain(frame.sampling),
            adapter=frame.adapter,
            kv_key=frame.kv_key,
        )
        self.attempt_table.add(attempt, now, frame.remaining_s)
        if origin is not None:
            self.stepper.forks.add(attempt, origin)
        elif is_local:
            self.stepper.prompts.add(attempt)

    def _grant_tokens(self, server: PeerId, frame: TokenCredit) -> None:
        for row in frame.rows:
            attempt = self.attempt_table.attempts.get(row.key)
            if attempt is not None and attempt.server == server:
                self.stepper.credit(attempt, row)

    def _on_end(self, attempt: DecodeAttempt, now: float) -> None:
        self.stepper.forks.forsake(attempt, now)
        self._speculation.forget(attempt.key)
        if not attempt.assembly.is_complete:
            self._intake.abandon(attempt)
        keep_completion(self._engine.prefix_cache, attempt, self._engine.block_size)

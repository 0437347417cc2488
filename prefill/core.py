"""The prefill worker's state machine: frames and step results in, frames and step plans out. No
I/O.

worker/worker_loop.py passes received frames to it, runs the planned steps, maintains the KV links,
and sends its frames.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final

from engine.batch import check_request
from engine.pooling import Pool
from transport.digest import KV_KEY_BYTES
from transport.frames import (
    Embed,
    EndReason,
    KvCredit,
    KvDone,
    KvResend,
    Load,
    Prefill,
    WorkerHeartbeat,
    frame_name,
)
from transport.lease import PREFILL_TRANSITIONS, LeaseState, Standing
from transport.tokens import unpack_tokens
from triolet.audit import ProcessFacts
from triolet.config import EmbeddingConfig
from triolet.errors import RemoteProtocolError, RequestError
from triolet.fair_lru import Keeper
from triolet.pooling import VectorForm
from triolet.sampling import SamplingParams
from worker.account import cache_load, worker_account
from worker.attempt_table import AttemptTable
from worker.counters import Counters, Drop
from worker.engine_port import require_adapter
from worker.outbox import Outbox
from worker.server_sessions import ServerSessions

from .attempt import PrefillAttempt
from .embedding import Embedding
from .shipper import KvSend, Shipper
from .stepper import PrefillStepper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transport.frames import AnyFrame, KvTarget
    from triolet.audit import WorkerAudit
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey, PeerId
    from worker.engine_port import EnginePort
    from worker.identity import Identity


BATCHING: Final = EmbeddingConfig()
MAX_OVERRUN: Final = 4
"""Factor on `max_waiting_tokens` beyond which a prompt is refused: shares of credit change while
frames are under way, and cached prompts may have been evicted, so servers together may briefly
exceed the limit."""


NOTHING_SAMPLED: Final = SamplingParams()


class PrefillCore:
    """The decisions of one prefill worker.

    Args:
      engine: blocks and their bytes.
      identity: identity of this worker.
      link: lifetimes and bounds.
      ring: host memory for outgoing KV.
      now: time of the start.
      read_process: returns facts from the operating system; empty by default.
      embedding: how embedding inputs are batched.

    Attributes:
      outbox: frames for servers.
      counters: counters of this worker.
      attempt_table: the attempts with leases.
      server_sessions: sessions with servers; heartbeats and drains.
      stepper: plans steps and processes their results.
      shipper: transfers to decode workers.
    """

    def __init__(
        self,
        engine: EnginePort,
        identity: Identity,
        link: LinkConfig,
        ring: memoryview,
        now: float,
        read_process: Callable[[], ProcessFacts] = ProcessFacts,
        embedding: EmbeddingConfig = BATCHING,
    ) -> None:
        self.outbox = Outbox()
        self.counters = Counters()
        self.attempt_table: AttemptTable[PrefillAttempt | Embedding] = AttemptTable(
            engine.ledger, PREFILL_TRANSITIONS, link, self.outbox, on_end=self._on_end
        )
        self.shipper = Shipper(link, ring, engine.bytes_per_block, self._export)
        self._engine = engine
        self._identity = identity
        self._link = link
        self._read_process = read_process
        self._orders = count()
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
        self.stepper = PrefillStepper(
            engine,
            self.attempt_table,
            self.shipper,
            self.outbox,
            self.counters,
            embedding,
        )

    def wake(self, now: float) -> None:
        """Call this before handing in frames and at every sweep: after a standstill a worker must
        not act on its old state."""
        if self.server_sessions.is_fenced(now):
            self.server_sessions.begin_new_life(now)
            for target in self.shipper.targets:
                self.shipper.close_lane(target)
        elif absence_s := self.server_sessions.excuse():
            self.shipper.excuse(absence_s)

    def on_control(self, sender: bytes, frame: AnyFrame, now: float) -> None:
        """Process a frame of a server."""
        server = self.server_sessions.take(sender, frame, now)
        if server is None:
            return
        try:
            match frame:
                case Prefill():
                    self._accept(server, frame, now)
                case Embed():
                    self._accept_input(server, frame, now)
                case _:
                    raise RemoteProtocolError(f"no {frame_name(frame)} to a prefill worker")
        except (RemoteProtocolError, RequestError) as error:
            self.server_sessions.reject(server, frame, error, now)

    def on_kv(self, target: KvTarget, frame: AnyFrame, now: float) -> None:
        """Process an answer of a decode worker."""
        match frame:
            case KvCredit():
                self.shipper.on_credit(target, frame, now)
            case KvResend():
                self.counters.bad_digests += len(frame.indices)
                self.shipper.on_resend(target, frame, now)
            case KvDone():
                self._on_done(target, frame.key, now)
            case _:
                self.counters.drop(Drop.UNEXPECTED)

    def on_target_lost(self, target: KvTarget, reason: str, now: float) -> None:
        """A decode worker is gone, has restarted, or has another model."""
        for key in self.shipper.close_lane(target):
            self.attempt_table.end(key, EndReason.PEER_LOST, now, reason)

    def take_kv_sends(self, now: float) -> Iterator[KvSend]:
        """Export final blocks, yield the frames to send to decode now, and free exported blocks."""
        yield from self.shipper.pump(now)
        self.counters.kv_bytes = self.shipper.sent_bytes
        for key in self.shipper.exported():
            self._engine.ledger.release(key)

    def sweep(self, now: float) -> None:
        """End what is due, and give up receivers that do not answer."""
        self.server_sessions.sweep(now)
        for target in self.shipper.stalled(now):
            self.on_target_lost(target, f"{target.peer.name} does not answer", now)

    def say_goodbye(self) -> None:
        """Notify every server that this worker is leaving."""
        self.server_sessions.say_goodbye()

    def load(self) -> Load:
        """Return the worker's load."""
        ledger, leases, counters = self._engine.ledger, self.attempt_table.leases, self.counters
        return Load(
            free_blocks=ledger.free_blocks,
            cached_blocks=ledger.cached_blocks,
            leased_blocks=ledger.leased_blocks,
            running=leases.count(LeaseState.RUNNING),
            waiting=leases.count(LeaseState.RESERVED),
            waiting_tokens=self._num_waiting_tokens(),
            steps=counters.steps,
            computed_tokens=counters.computed_tokens,
            kv_bytes=counters.kv_bytes,
            kv_shared_bytes=counters.kv_shared_bytes,
            borrowed_steps=counters.borrowed_steps,
            busy_s=counters.busy_s,
            busy_row_s=counters.busy_row_s,
            stale_frames=counters.stale_frames,
            bad_digests=counters.bad_digests,
            dropped=counters.dropped_by_reason(),
            cache=cache_load(self._engine.prefix_cache),
            step_s=self.stepper.rates.step_s,
            prompt_tokens_per_s=self.stepper.rates.prompt_tokens_per_s,
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
            windows=self.shipper.windows(),
            process=self._read_process(),
        )

    def _describe(self, server: PeerId) -> WorkerHeartbeat:
        del server  # every server gets the same share
        num_servers = max(1, len(self.server_sessions.servers))
        return WorkerHeartbeat(
            epoch=self._identity.me.epoch,
            progress=self.counters.steps,
            has_work=self.attempt_table.is_stepping,
            is_draining=self.server_sessions.is_draining,
            load=self.load(),
            token_credit=self._identity.capacity.max_waiting_tokens // num_servers,
        )

    def _num_waiting_tokens(self) -> int:
        # Embedding inputs give way to prompts, so they do not count as waiting.
        attempts = self.attempt_table.attempts.values()
        return sum(a.num_remaining_tokens for a in attempts if isinstance(a, PrefillAttempt))

    def _accept(self, server: PeerId, frame: Prefill, now: float) -> None:
        standing = self.attempt_table.leases.standing(frame.key)
        if standing is Standing.ENDED:
            self.attempt_table.repeat_last_words(server, frame.key)
        elif standing is Standing.NEW:
            self.attempt_table.end_older(frame.key, now)
            prompt_ids = unpack_tokens(frame.prompt)
            check_request(self._engine.vocab_size, prompt_ids, frame.sampling)
            require_adapter(self._engine, frame.adapter, self._identity.me)
            if self._link.wire.plaintext and len(frame.kv_key) != KV_KEY_BYTES:
                raise RemoteProtocolError(
                    f"{self._identity.me.name} sends KV in plaintext, and this server sends no key "
                    "for its MAC: upgrade the server, or leave link.wire.plaintext off"
                )
            if self.server_sessions.is_draining:
                self.attempt_table.turn_away(server, frame.key, EndReason.DRAIN, now)
            else:
                num_blocks = -(-len(prompt_ids) // self._engine.block_size)
                prospect = self._engine.prefix_cache.prospect(
                    frame.prompt, frame.cache_key, num_blocks
                )
                num_cached_tokens = prospect.num_cached_blocks * self._engine.block_size
                self._check_room(len(prompt_ids), num_cached_tokens, frame.held_blocks)
                self._admit(server, frame, prompt_ids, num_cached_tokens, now)

    def _accept_input(self, server: PeerId, frame: Embed, now: float) -> None:
        standing = self.attempt_table.leases.standing(frame.key)
        if standing is Standing.ENDED:
            self.attempt_table.repeat_last_words(server, frame.key)
        elif standing is Standing.NEW:
            self.attempt_table.end_older(frame.key, now)
            input_ids = unpack_tokens(frame.prompt)
            check_request(self._engine.vocab_size, input_ids, NOTHING_SAMPLED)
            require_adapter(self._engine, frame.adapter, self._identity.me)
            if self.server_sessions.is_draining:
                self.attempt_table.turn_away(server, frame.key, EndReason.DRAIN, now)
                return
            self._check_input(len(input_ids))
            form = VectorForm(frame.pooling, frame.dimensions, frame.is_normalized)
            embedding = Embedding(
                key=frame.key,
                server=server,
                prompt_ids=input_ids,
                pool=Pool(form, len(input_ids)),
                priority=frame.priority,
                order=next(self._orders),
                arrived_at=now,
                num_blocks=-(-len(input_ids) // self._engine.block_size),
                adapter=frame.adapter,
            )
            self.attempt_table.add(embedding, now, frame.remaining_s)

    def _check_input(self, num_tokens: int) -> None:
        capacity = self._identity.capacity
        if num_tokens > capacity.max_model_len:
            raise RemoteProtocolError(
                f"an input of {num_tokens} tokens; {self._identity.me.name} can hold "
                f"{capacity.max_model_len}"
            )
        waiting = sum(one.num_remaining_tokens for one in self.stepper.embedder.waiting)
        most = MAX_OVERRUN * capacity.max_waiting_tokens
        if waiting and waiting + num_tokens > most:
            raise RemoteProtocolError(f"{waiting} tokens of inputs wait; the limit is {most}")

    def _check_room(self, num_prompt_tokens: int, num_cached_tokens: int, held_blocks: int) -> None:
        capacity = self._identity.capacity
        if num_prompt_tokens > capacity.max_model_len:
            raise RemoteProtocolError(
                f"a prompt of {num_prompt_tokens} tokens; {self._identity.me.name} can hold "
                f"{capacity.max_model_len} ({capacity.num_blocks} blocks of {capacity.block_size})"
            )
        if held_blocks * capacity.block_size >= num_prompt_tokens:
            raise RemoteProtocolError(f"{held_blocks} cached blocks leave nothing to compute")
        waiting = self._num_waiting_tokens()
        most = MAX_OVERRUN * capacity.max_waiting_tokens
        if waiting and waiting + num_prompt_tokens - num_cached_tokens > most:
            raise RemoteProtocolError(
                f"{waiting} prompt tokens already wait; the limit is {most}: respect the credit"
            )

    def _admit(
        self,
        server: PeerId,
        frame: Prefill,
        prompt_ids: tuple[int, ...],
        num_cached_tokens: int,
        now: float,
    ) -> None:
        num_blocks = -(-len(prompt_ids) // self._engine.block_size)
        attempt = PrefillAttempt(
            key=frame.key,
            server=server,
            prompt_ids=prompt_ids,
            packed_ids=frame.prompt,
            cache_key=frame.cache_key,
            sampling=frame.sampling,
            eos_token_ids=frame.eos_token_ids,
            priority=frame.priority,
            order=next(self._orders),
            arrived_at=now,
            num_blocks=num_blocks,
            num_needed_blocks=num_blocks,
            num_computed_tokens=num_cached_tokens,
            keeper=Keeper(frame.tenant, frame.cache_share),
            constraint=self._engine.constrain(frame.sampling),
            adapter=frame.adapter,
        )
        self.attempt_table.add(attempt, now, frame.remaining_s)
        self.shipper.begin(
            frame.key,
            frame.target,
            num_blocks=num_blocks,
            num_tokens=len(prompt_ids),
            held_blocks=frame.held_blocks,
            now=now,
            kv_key=frame.kv_key,
        )

    def _on_done(self, target: KvTarget, key: AttemptKey, now: float) -> None:
        """Decode has everything, or has ended the attempt and tells the server itself."""
        has_everything = self.shipper.on_done(target, key, now)
        if has_everything is None:
            return
        if has_everything:
            self.attempt_table.end(key, EndReason.HANDED_OVER, now)
        else:
            self.attempt_table.end(key, EndReason.UNWANTED, now)

    def _on_end(self, attempt: PrefillAttempt | Embedding, now: float) -> None:
        del now
        if isinstance(attempt, PrefillAttempt):
            self.shipper.forget(attempt.key)

    def _export(self, key: AttemptKey, blocks: range, into: memoryview) -> None:
        table = self.attempt_table.attempts[key].block_table[blocks.start : blocks.stop]
        self._engine.export_blocks(table, into)

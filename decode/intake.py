"""Receive KV chunks from prefill workers, and write those with a live lease into the pool.

Every chunk is acknowledged, even a dropped one, so that the sender's window is always freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.digest import is_authentic
from transport.frames import EndReason, KvCredit, KvDone, KvResend
from transport.lease import LeaseEvent, LeaseState
from triolet.errors import RemoteProtocolError
from worker.counters import Drop

from .assembly import ChunkVerdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.frames import KvChunk, KvManifest
    from triolet.config import LinkConfig
    from triolet.ids import AttemptKey
    from worker.attempt_table import AttemptTable
    from worker.counters import Counters
    from worker.engine_port import EnginePort
    from worker.identity import Identity
    from worker.outbox import Outbox

    from .attempt import DecodeAttempt

_INCOMPLETE = (LeaseState.RESERVED, LeaseState.FILLING)


class KvIntake:
    """Takes chunks and manifests for all attempts of one decode worker.

    Args:
      engine: with the blocks.
      identity: holds the present epoch.
      link: how often a chunk may arrive damaged, and whether each needs a MAC.
      attempt_table: the attempts with leases.
      outbox: takes the answers.
      counters: counters of received frames.
      on_complete: called with each attempt once its KV is complete, in state READY.
    """

    def __init__(
        self,
        engine: EnginePort,
        identity: Identity,
        link: LinkConfig,
        attempt_table: AttemptTable[DecodeAttempt],
        outbox: Outbox,
        counters: Counters,
        on_complete: Callable[[DecodeAttempt, float], None],
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._max_resends = link.max_chunk_resends
        self._needs_mac = link.wire.plaintext
        self._attempt_table = attempt_table
        self._outbox = outbox
        self._counters = counters
        self._on_complete = on_complete

    def on_chunk(
        self, sender: bytes, chunk: KvChunk, payload: bytes | memoryview, now: float
    ) -> None:
        """Copy a wanted chunk into its leased blocks, and answer it. A forged one gets no answer;
        if the real one was lost, it is sent again when its answer is overdue."""
        if self._is_forged(chunk, payload):
            return
        attempt = self._wanted(sender, chunk.key, chunk.target_epoch)
        if attempt is None:
            self._give_credit(sender, chunk, payload)
            return
        try:
            verdict = attempt.assembly.judge(chunk, payload)
        except RemoteProtocolError as error:
            self._give_credit(sender, chunk, payload)
            self._attempt_table.end(chunk.key, EndReason.ERROR, now, str(error))
            return
        if verdict is ChunkVerdict.CORRUPT:
            self._on_corrupt(sender, attempt, chunk, now)
            return
        if verdict is ChunkVerdict.TAKEN:
            end = chunk.first_block + chunk.num_blocks
            self._engine.import_blocks(attempt.block_table[chunk.first_block : end], payload)
            self._counters.kv_bytes += len(payload)
            if chunk.shared is not None:
                self._counters.kv_shared_bytes += len(payload)
            if self._state(chunk.key) is LeaseState.RESERVED:
                self._attempt_table.leases.step(chunk.key, LeaseEvent.FIRST_CHUNK)
        self._give_credit(sender, chunk, payload)
        self._finish_if_complete(attempt, now)

    def on_manifest(self, sender: bytes, manifest: KvManifest, now: float) -> None:
        """Record the manifest; with it and every chunk the attempt is ready."""
        if self._is_forged(manifest):
            return
        attempt = self._wanted(sender, manifest.key, manifest.target_epoch)
        if attempt is None:
            return
        try:
            attempt.assembly.accept_manifest(manifest)
        except RemoteProtocolError as error:
            self._attempt_table.end(manifest.key, EndReason.ERROR, now, str(error))
            return
        self._finish_if_complete(attempt, now)

    def abandon(self, attempt: DecodeAttempt) -> None:
        """Notify the sender of an ended attempt that no more KV is needed."""
        if attempt.kv_sender is not None:
            self._say_done(attempt.kv_sender, attempt.key)

    def _is_forged(self, frame: KvChunk | KvManifest, payload: bytes | memoryview = b"") -> bool:
        """Return whether a frame for a live attempt lacks the attempt's MAC."""
        attempt = self._attempt_table.attempts.get(frame.key)
        if not self._needs_mac or attempt is None or is_authentic(frame, attempt.kv_key, payload):
            return False
        self._counters.drop(Drop.FORGED)
        return True

    def _wanted(self, sender: bytes, key: AttemptKey, target_epoch: int) -> DecodeAttempt | None:
        """Return the attempt for this frame, or None after answering that it is not wanted."""
        attempt = self._attempt_table.attempts.get(key)
        is_alien = attempt is None or attempt.is_local  # its KV is only computed here
        if attempt is None or is_alien or target_epoch != self._identity.me.epoch:
            self._counters.drop(Drop.STALE)
            self._say_done(sender, key)
            return None
        if self._state(key) not in _INCOMPLETE:
            # A repeat of a frame that arrived in time: its answer was lost.
            self._say_done(sender, key)
            return None
        attempt.kv_sender = sender
        return attempt

    def _state(self, key: AttemptKey) -> LeaseState:
        lease = self._attempt_table.leases.get(key)
        return LeaseState.RELEASED if lease is None else lease.state

    def _on_corrupt(
        self, sender: bytes, attempt: DecodeAttempt, chunk: KvChunk, now: float
    ) -> None:
        self._counters.bad_digests += 1
        failures = attempt.assembly.num_failures(chunk.index)
        if failures > self._max_resends:
            message = f"chunk {chunk.index} arrived damaged {failures} times: the path is broken"
            self._attempt_table.end(chunk.key, EndReason.ERROR, now, message)
        else:
            self._outbox.to_sender(sender, KvResend(*chunk.key, indices=(chunk.index,)))

    def _finish_if_complete(self, attempt: DecodeAttempt, now: float) -> None:
        if attempt.assembly.is_complete:
            self._attempt_table.leases.step(attempt.key, LeaseEvent.COMPLETE)
            self.abandon(attempt)
            self._on_complete(attempt, now)

    def _give_credit(self, sender: bytes, chunk: KvChunk, payload: bytes | memoryview) -> None:
        credit = KvCredit(*chunk.key, index=chunk.index, num_bytes=len(payload))
        self._outbox.to_sender(sender, credit)

    def _say_done(self, sender: bytes, key: AttemptKey) -> None:
        self._outbox.to_sender(sender, KvDone(*key))

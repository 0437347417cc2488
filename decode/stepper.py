"""From one decode step to the next: who has a row, what came of it, who is told.

Knows attempts, blocks and results; does not know who computed KV that came from elsewhere, nor how
steps are run. Chunks of prompts that are computed here ride along with the rows of running streams.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

from transport.frames import MAX_TOKEN_ROWS, EndReason, Tokens
from transport.lease import LeaseEvent, LeaseState
from worker.chunks import Chunk, ChunkScheduler, chunk_row
from worker.rates import StepRates
from worker.roster import FailedStep
from worker.rows import token_row

from .scheduler import plan_step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.batch import Sampled, StepRow
    from transport.frames import CreditRow, TokenRow
    from triolet.ids import PeerId
    from worker.counters import Counters
    from worker.engine_port import EnginePort
    from worker.identity import Identity
    from worker.outbox import Outbox
    from worker.roster import Roster

    from .attempt import Attempt

PROMPT_ROWS: Final = 4
"""One row in this many may be a prompt's while streams run: more would each have a few tokens only,
and streams would lose their turns to them."""


class Stepper:
    """Plans steps and takes in their results.

    Args:
      engine: whose blocks grow.
      identity: names rows and context length.
      roster: who holds a lease.
      outbox: takes the TOKENS frames.
      counters: of steps, tokens and preemptions.

    Attributes:
      rates: how fast steps have been.
    """

    def __init__(
        self,
        engine: EnginePort,
        identity: Identity,
        roster: Roster[Attempt],
        outbox: Outbox,
        counters: Counters,
    ) -> None:
        self._engine = engine
        self._capacity = identity.capacity
        self._roster = roster
        self._outbox = outbox
        self._counters = counters
        self.rates = StepRates(engine.pace)
        self._scheduler: ChunkScheduler[Attempt] = ChunkScheduler()
        self._rows: list[Attempt] = []
        self._chunks: list[Chunk[Attempt]] = []
        self._began_at = 0.0

    def plan(self, now: float) -> list[StepRow]:
        """Begin the next step; an empty list means that there is nothing to compute."""
        ledger, max_rows = self._engine.ledger, self._capacity.max_num_seqs
        most_prompts = max(1, max_rows // PROMPT_ROWS)
        num_prompts = min(len(self._prompts()), most_prompts)
        plan = plan_step(
            self._roster.attempts.values(),
            self._runnable(),
            free_blocks=ledger.available_blocks,
            block_size=self._engine.block_size,
            max_num_seqs=max_rows - num_prompts,
        )
        for attempt in plan.preempted:
            self._counters.preemptions += 1
            self._roster.end(attempt.key, EndReason.PREEMPTED, now)
        for attempt in plan.growing:
            attempt.block_table += ledger.extend(attempt.key, 1)
        self._rows, self._began_at = plan.rows, now
        budget = self.rates.chunk_tokens(len(plan.rows))
        self._chunks = self._scheduler.plan(self._prompts(), budget, 0, most_prompts)
        for chunk in self._chunks:
            lease = self._roster.leases.get(chunk.attempt.key)
            if lease is not None and lease.state is LeaseState.RESERVED:
                self._roster.leases.step(lease.key, LeaseEvent.START)
        in_step = [*plan.rows, *(chunk.attempt for chunk in self._chunks)]
        self._roster.begin_step(attempt.key for attempt in in_step)
        return [attempt.row() for attempt in plan.rows] + [chunk_row(c) for c in self._chunks]

    def complete(self, results: Sequence[Sampled | None], now: float) -> None:
        """Take in what the step that `plan` began has computed."""
        rows, chunks = self._take_step(now)
        num_prompt_tokens = sum(chunk.num_tokens for chunk in chunks)
        self.rates.took(
            now - self._began_at, num_prompt_tokens=num_prompt_tokens, num_decode_rows=len(rows)
        )
        self._take_tokens(rows, results[: len(rows)], now)
        for chunk, sampled in zip(chunks, results[len(rows) :], strict=True):
            self._take_chunk(chunk, sampled, now)

    def fail(self, message: str, now: float) -> None:
        """The step that `plan` began raised: each of its attempts ends, the others go on."""
        rows, chunks = self._take_step(now)
        struck = [*rows, *(chunk.attempt for chunk in chunks)]
        failed = FailedStep(self._counters.steps, len(struck))
        for attempt in struck:
            self._roster.end(attempt.key, EndReason.ERROR, now, message, failed)

    def _take_step(self, now: float) -> tuple[list[Attempt], list[Chunk[Attempt]]]:
        self._counters.steps += 1
        rows, self._rows = self._rows, []
        chunks, self._chunks = self._chunks, []
        self._roster.finish_step(now)
        return rows, chunks

    def _take_tokens(
        self, rows: list[Attempt], results: Sequence[Sampled | None], now: float
    ) -> None:
        produced: list[tuple[Attempt, TokenRow]] = []
        for attempt, sampled in zip(rows, results, strict=True):
            self._counters.computed_tokens += 1
            if attempt.key not in self._roster.attempts:
                self._counters.late_rows += 1
                continue  # it ended meanwhile: its token is never seen
            is_replay = not attempt.samples_next
            attempt.num_computed_tokens += 1
            attempt.last_turn = self._counters.computed_tokens
            if is_replay:
                continue
            assert sampled is not None, "a row that samples has a result"
            row = token_row(attempt.key, len(attempt.output_ids), sampled)
            produced.append((attempt, row))
            attempt.unheard.append(row)
            attempt.output_ids.append(sampled.token_id)
        self._tell([(attempt.server, row) for attempt, row in produced])
        self._end_finished((attempt for attempt, _ in produced), now)

    def _take_chunk(self, chunk: Chunk[Attempt], sampled: Sampled | None, now: float) -> None:
        attempt, num_tokens = chunk
        self._counters.computed_tokens += num_tokens
        if attempt.key not in self._roster.attempts:
            self._counters.late_rows += 1
            return
        attempt.num_computed_tokens += num_tokens
        if attempt.num_remaining_tokens == 0:
            assert sampled is not None, "the last chunk of a prompt has a result"
            self._counters.local_prompts += 1
            self._roster.leases.step(attempt.key, LeaseEvent.COMPLETE)
            self._begin(attempt, token_row(attempt.key, 0, sampled), now)

    def join(self, attempt: Attempt, now: float) -> None:
        """Take an attempt whose KV has come; its row comes with the next step."""
        manifest = attempt.assembly.manifest
        assert manifest is not None, "complete without a manifest"
        attempt.num_computed_tokens = len(attempt.prompt_ids)
        self._begin(attempt, manifest.first, now)

    def _begin(self, attempt: Attempt, first: TokenRow, now: float) -> None:
        """Take an attempt whose prompt is computed.

        The first token decides whether this attempt continues what its client has already: it was
        sampled again, and must be the one that was sent.
        """
        if first.token_id >= self._engine.vocab_size:
            message = f"prefill chose token {first.token_id}, which is not in the vocabulary"
            self._roster.end(attempt.key, EndReason.ERROR, now, message)
            return
        if attempt.replay_ids:
            if first.token_id != attempt.replay_ids[0]:
                message = (
                    f"the prompt's first token is {first.token_id} now and was "
                    f"{attempt.replay_ids[0]} before: the continuation would not be the same"
                )
                self._roster.end(attempt.key, EndReason.ERROR, now, message)
                return
            attempt.output_ids += attempt.replay_ids
        else:
            attempt.output_ids.append(first.token_id)
            attempt.unheard.append(first)
            self._tell([(attempt.server, first)])
        self._end_finished((attempt,), now)

    def credit(self, attempt: Attempt, row: CreditRow) -> None:
        """Take in how far an attempt may run, and how far its server has heard of it.

        What allows nothing new is said by a server that waits: the rows that it misses are said
        once more, since they may be lost together with every sign that there were any.
        """
        attempt.unheard = [r for r in attempt.unheard if r.position >= row.received]
        if not attempt.window.grant(row.allowed) and attempt.unheard:
            rows = attempt.unheard[:MAX_TOKEN_ROWS]
            self._tell((attempt.server, repeated) for repeated in rows)

    def _prompts(self) -> list[Attempt]:
        """Return the attempts whose prompts are computed here and are not done."""
        return [a for a in self._roster.attempts.values() if a.num_remaining_tokens]

    def _runnable(self) -> list[Attempt]:
        """Move leases between READY, RUNNING and PAUSED; return who may have a row."""
        leases = self._roster.leases
        runnable = []
        for lease in leases.leases():
            attempt = self._roster.attempts[lease.key]
            state = lease.state
            if state is LeaseState.READY:
                state = leases.step(lease.key, LeaseEvent.START)
            if state is LeaseState.RUNNING and attempt.is_blocked:
                state = leases.step(lease.key, LeaseEvent.PAUSE)
            elif state is LeaseState.PAUSED and not attempt.is_blocked:
                state = leases.step(lease.key, LeaseEvent.RESUME)
            if state is LeaseState.RUNNING:
                runnable.append(attempt)
        return runnable

    def _tell(self, rows: Iterable[tuple[PeerId, TokenRow]]) -> None:
        """Send each server its rows of this step in one frame."""
        by_server: defaultdict[PeerId, list[TokenRow]] = defaultdict(list)
        for server, row in rows:
            by_server[server].append(row)
        for server, its_rows in by_server.items():
            frame = Tokens(self._counters.steps, tuple(its_rows))
            self._outbox.to_server(server.identity(), frame)

    def _end_finished(self, attempts: Iterable[Attempt], now: float) -> None:
        for attempt in attempts:
            reason = attempt.finish_reason(self._capacity.max_model_len)
            if reason is not None:
                self._roster.end(attempt.key, reason, now)

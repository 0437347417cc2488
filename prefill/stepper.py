"""Plan the steps of a prefill worker and process their results.

A prompt waits if its next blocks are being computed for another prompt, so that no block is
computed twice. worker/chunks.py chooses among prompts that do not wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.batch import Barred
from engine.pace import StepBudget
from transport.frames import EndReason, FirstToken
from transport.lease import LeaseEvent
from worker.attempt_table import FailedStep
from worker.chunks import ChunkScheduler, PromptChunk, chunk_row
from worker.rates import StepRates
from worker.rows import ENDS, token_row

from .attempt import PrefillAttempt
from .embedding import Embedder, part_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.batch import Sampled, StepRow
    from engine.prefix_cache import PrefixCache, PrefixFrontier
    from triolet.config import EmbeddingConfig
    from worker.attempt_table import AttemptTable
    from worker.counters import Counters
    from worker.engine_port import EnginePort
    from worker.outbox import Outbox

    from .embedding import Embedding
    from .shipper import Shipper


def candidates(
    attempts: Iterable[PrefillAttempt], cache: PrefixCache, block_size: int
) -> list[PrefillAttempt]:
    """Return the attempts to plan with; for waiting ones, update what their start would find
    cached.

    Args:
      attempts: attempts with prompts that are not fully computed.
      cache: prefix cache of the worker.
      block_size: tokens per block.
    """
    chosen: list[PrefillAttempt] = []
    ahead: dict[PrefixFrontier, int] = {}
    for attempt in sorted(attempts, key=_by_precedence):
        prospect = cache.prospect(attempt.packed_ids, attempt.cache_key, attempt.num_blocks)
        frontier = prospect.frontier
        if not attempt.is_started:
            attempt.num_computed_tokens = prospect.num_cached_blocks * block_size
            attempt.num_needed_blocks = prospect.num_needed_blocks
            # A higher class never waits for a lower one.
            if frontier in ahead and ahead[frontier] <= attempt.priority:
                continue
        if frontier is not None:
            ahead[frontier] = min(attempt.priority, ahead.get(frontier, attempt.priority))
        chosen.append(attempt)
    return chosen


def _by_precedence(attempt: PrefillAttempt) -> tuple[bool, int, int]:
    return (not attempt.is_started, attempt.priority, attempt.order)


class PrefillStepper:
    """Plans steps and processes their results.

    Args:
      engine: with the blocks.
      attempt_table: the attempts with leases.
      shipper: told how far each prompt is.
      outbox: takes the FIRST_TOKEN frames.
      counters: counters of steps and tokens.
      embedding: how embedding inputs are batched.

    Attributes:
      rates: speed of steps.
      embedder: plans the inputs of each step.
    """

    def __init__(
        self,
        engine: EnginePort,
        attempt_table: AttemptTable[PrefillAttempt | Embedding],
        shipper: Shipper,
        outbox: Outbox,
        counters: Counters,
        embedding: EmbeddingConfig,
    ) -> None:
        self._engine = engine
        self._attempt_table = attempt_table
        self._shipper = shipper
        self._outbox = outbox
        self._counters = counters
        self.rates = StepRates(engine.pace)
        self.embedder = Embedder(engine, attempt_table, outbox, counters, embedding)
        self._scheduler: ChunkScheduler[PrefillAttempt] = ChunkScheduler()
        self._budget = StepBudget(engine.pace)
        self._wide_budget = StepBudget.of_wide_steps(engine.pace, embedding.max_batch_tokens)
        self._chunks: list[PromptChunk[PrefillAttempt]] = []
        self._began_at = 0.0

    @property
    def has_work(self) -> bool:
        """Return whether a prompt or an input is not computed yet."""
        return any(
            attempt.num_remaining_tokens for attempt in self._attempt_table.attempts.values()
        )

    def plan(self, now: float) -> list[StepRow]:
        """Begin the next step; an empty list means that there is nothing to compute, or no room for
        the results."""
        self._began_at = now
        prompts = self._prompts
        inputs_due_at = self.embedder.due_at
        tokens = part_tokens(
            self._budget.tokens,
            self._wide_budget.tokens,
            chats_wait=bool(prompts),
            inputs_are_due=inputs_due_at is not None and inputs_due_at <= now,
        )
        engine = self._engine
        waiting = [] if self._shipper.is_full else self._candidates(prompts)
        self._chunks = self._scheduler.plan(waiting, tokens.prompts, engine.ledger.available_blocks)
        for chunk in self._chunks:
            if not chunk.attempt.is_started:
                self._start(chunk.attempt, now)
        left = tokens.all - sum(chunk.num_tokens for chunk in self._chunks)
        inputs = self.embedder.plan(left, now, is_beside_chat=bool(self._chunks))
        keys = [chunk.attempt.key for chunk in self._chunks] + self.embedder.keys
        self._attempt_table.begin_step(keys)
        return [*(chunk_row(chunk) for chunk in self._chunks), *inputs]

    def due_after(self, now: float) -> float | None:
        """Return when there will be something to plan even if nothing happens; None if never."""
        due_at = self.embedder.due_at
        return due_at if due_at is not None and due_at > now else None

    @property
    def _prompts(self) -> list[PrefillAttempt]:
        """Prompts of chats that are not computed yet."""
        attempts = self._attempt_table.attempts.values()
        return [a for a in attempts if isinstance(a, PrefillAttempt) and not a.is_computed]

    def _candidates(self, prompts: list[PrefillAttempt]) -> list[PrefillAttempt]:
        return candidates(prompts, self._engine.prefix_cache, self._engine.block_size)

    def complete(self, results: Sequence[Sampled | None], now: float) -> None:
        """Process the results of the step that `plan` began."""
        num_inputs_tokens = self.embedder.num_tokens
        chunks = self._take_chunks(now)
        num_tokens = sum(chunk.num_tokens for chunk in chunks) + num_inputs_tokens
        # Use the rate with this worker's own cores: others want theirs back at any time.
        elapsed_s, speedup = now - self._began_at, self._engine.speedup
        self._counters.borrowed_steps += speedup > 1.0
        self._budget.took(num_tokens, elapsed_s * speedup)
        if not chunks:
            self._wide_budget.took(num_tokens, elapsed_s * speedup)
        self.rates.took(elapsed_s, num_prompt_tokens=num_tokens, speedup=speedup)
        for chunk, sampled in zip(chunks, results, strict=False):  # inputs' results follow
            attempt = chunk.attempt
            self._counters.computed_tokens += chunk.num_tokens
            if attempt.key not in self._attempt_table.attempts:
                self._counters.late_rows += 1
                continue  # it ended during the step
            attempt.num_computed_tokens += chunk.num_tokens
            if sampled is not None and sampled.barred is Barred.LATE:
                # Compute its last token again in the next step: same KV, same place.
                attempt.num_computed_tokens -= 1
            num_full_blocks = attempt.num_computed_tokens // self._engine.block_size
            self._engine.prefix_cache.insert(
                attempt.packed_ids,
                attempt.cache_key,
                attempt.block_table[:num_full_blocks],
                attempt.keeper,
            )
            if attempt.is_computed:
                assert sampled is not None, "the last chunk of a prompt has a result"
                if sampled.barred is not None:
                    reason, message = ENDS[sampled.barred]
                    self._attempt_table.end(attempt.key, reason, now, message)
                    continue
                self._finish(attempt, sampled, now)
            else:
                self._shipper.computed(attempt.key, num_full_blocks, None)
        self.embedder.complete(now)

    def fail(self, message: str, now: float) -> None:
        """Process the failure of the step that `plan` began: its attempts end, the others
        continue."""
        num_inputs = len(self.embedder.keys)
        chunks = self._take_chunks(now)
        failed = FailedStep(self._counters.steps, len(chunks) + num_inputs)
        for chunk in chunks:
            self._attempt_table.end(chunk.attempt.key, EndReason.ERROR, now, message, failed)
        self.embedder.fail(message, failed, now)

    def _take_chunks(self, now: float) -> list[PromptChunk[PrefillAttempt]]:
        self._counters.steps += 1
        self._attempt_table.finish_step(now)
        chunks, self._chunks = self._chunks, []
        return chunks

    def _start(self, attempt: PrefillAttempt, now: float) -> None:
        attempt.block_table, num_cached_blocks = self._engine.prefix_cache.lease(
            attempt.key, attempt.packed_ids, attempt.cache_key, attempt.num_blocks
        )
        attempt.num_cached_tokens = num_cached_blocks * self._engine.block_size
        attempt.num_computed_tokens = attempt.num_cached_tokens
        attempt.started_at = now
        self._attempt_table.leases.step(attempt.key, LeaseEvent.START)
        self._shipper.computed(attempt.key, num_cached_blocks, None)

    def _finish(self, attempt: PrefillAttempt, sampled: Sampled, now: float) -> None:
        """Send the first token directly to the server; KV and manifest follow to decode."""
        assert attempt.started_at is not None, "computed without having started"
        self._attempt_table.leases.step(attempt.key, LeaseEvent.COMPUTED)
        first = token_row(attempt.key, 0, sampled)
        frame = FirstToken(
            *attempt.key,
            row=first,
            cached_tokens=attempt.num_cached_tokens,
            queue_s=attempt.started_at - attempt.arrived_at,
            compute_s=now - attempt.started_at,
        )
        self._outbox.to_server(attempt.server.identity(), frame)
        self._shipper.computed(attempt.key, attempt.num_blocks, first)

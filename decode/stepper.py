"""Plan the steps of a decode worker, process their results, and send tokens to servers.

Chunks of prompts that are computed here run beside the rows of streams.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING

from engine.batch import Barred
from transport.frames import MAX_TOKEN_ROWS, EndReason, Tokens
from transport.lease import LeaseEvent, LeaseState
from worker.attempt_table import NO_STEP, FailedStep
from worker.chunks import chunk_row
from worker.rows import ENDS, token_row

from .prompts import Forks, Prompts, keep_prompt
from .scheduler import plan_step
from .speculation import GuessRoom

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from engine.batch import Sampled, StepRow
    from transport.frames import CreditRow, TokenRow
    from triolet.ids import AttemptKey, PeerId
    from worker.attempt_table import AttemptTable
    from worker.chunks import PromptChunk
    from worker.counters import Counters
    from worker.engine_port import EnginePort
    from worker.identity import Identity
    from worker.outbox import Outbox

    from .attempt import DecodeAttempt
    from .speculation import GuessTurn, Speculation


class DecodeStepper:
    """Plans steps and processes their results.

    Args:
      engine: with the blocks.
      identity: names this worker in rows, and holds the context length.
      attempt_table: the attempts with leases.
      outbox: takes the TOKENS frames.
      counters: counters of steps, tokens and preemptions.
      speculation: chooses guesses.

    Attributes:
      prompts: prompts computed here.
      forks: attempts that share another one's prompt.
    """

    def __init__(
        self,
        engine: EnginePort,
        identity: Identity,
        attempt_table: AttemptTable[DecodeAttempt],
        outbox: Outbox,
        counters: Counters,
        speculation: Speculation,
    ) -> None:
        self._engine = engine
        self._capacity = identity.capacity
        self._attempt_table = attempt_table
        self._outbox = outbox
        self._counters = counters
        self._speculation = speculation
        self.prompts = Prompts(attempt_table, engine.pace, identity.capacity.max_num_seqs)
        self.forks = Forks(engine, attempt_table, self.prompts)
        self._turns: list[GuessTurn] = []
        self._awake: dict[AttemptKey, DecodeAttempt] = {}

    @property
    def has_work(self) -> bool:
        """Return whether a stream may need a row, or a prompt is to be computed here."""
        return bool(self._awake) or self.prompts.num_rows > 0

    def plan(self, now: float) -> list[StepRow]:
        """Begin the next step; an empty list means that there is nothing to compute."""
        ledger = self._engine.ledger
        plan = plan_step(
            self._attempt_table.attempts.values(),
            self._runnable(),
            free_blocks=ledger.available_blocks,
            num_returned=lambda leaving: ledger.num_only_of(attempt.key for attempt in leaving),
            block_size=self._engine.block_size,
            max_num_seqs=self._capacity.max_num_seqs - self.prompts.num_rows,
        )
        for attempt in plan.preempted:
            self._counters.preemptions += 1
            self._attempt_table.end(attempt.key, EndReason.PREEMPTED, now)
        for attempt in plan.growing:
            attempt.block_table += ledger.extend(attempt.key, 1)
        self._turns = self._speculation.plan(plan.rows, self._room())
        for turn in self._turns:
            if turn.num_new_blocks:
                added = ledger.extend(turn.attempt.key, turn.num_new_blocks)
                turn.attempt.block_table += added
        chunks = self.prompts.plan(len(plan.rows), now)
        in_step = [*plan.rows, *(chunk.attempt for chunk in chunks)]
        self._attempt_table.begin_step(attempt.key for attempt in in_step)
        rows = [
            row for turn in self._turns for row in turn.attempt.rows(turn.guesses, turn.num_more)
        ]
        return rows + [chunk_row(chunk) for chunk in chunks]

    def wanted_guesses(self) -> list[tuple[DecodeAttempt, int]]:
        """Return the attempts that will probably have a row in the next step and could use guesses,
        and how many."""
        rows = [
            attempt
            for key, attempt in self._awake.items()
            if key in self._attempt_table.attempts and not attempt.is_blocked
        ]
        return self._speculation.wanted(rows, self._capacity.max_model_len)

    def due_after(self, now: float) -> float | None:
        """Return None: there is never anything to plan if nothing happens."""
        del now
        return None

    def complete(self, results: Sequence[Sampled | None], now: float) -> None:
        """Process the results of the step that `plan` began."""
        turns, chunks = self._take_step(now)
        left = iter(results)
        self._take_tokens(turns, left, now)
        for chunk in chunks:
            self._take_chunk(chunk, next(left), now)
        assert next(left, None) is None, "results without a row"

    def fail(self, message: str, now: float) -> None:
        """Process the failure of the step that `plan` began: its attempts end, the others
        continue."""
        turns, chunks = self._take_step(now)
        struck = [*(turn.attempt for turn in turns), *(chunk.attempt for chunk in chunks)]
        failed = FailedStep(self._counters.steps, len(struck))
        for attempt in struck:
            self._attempt_table.end(attempt.key, EndReason.ERROR, now, message, failed)

    def _take_step(self, now: float) -> tuple[list[GuessTurn], list[PromptChunk[DecodeAttempt]]]:
        self._counters.steps += 1
        turns, self._turns = self._turns, []
        self._counters.borrowed_steps += self._engine.speedup > 1.0
        self._attempt_table.finish_step(now)
        return turns, self.prompts.take(len(turns), now, self._engine.speedup)

    def _take_tokens(
        self, turns: list[GuessTurn], results: Iterator[Sampled | None], now: float
    ) -> None:
        produced: list[tuple[DecodeAttempt, TokenRow]] = []
        for turn in turns:
            own = list(islice(results, turn.num_rows))
            self._counters.computed_tokens += len(own)
            if turn.attempt.key not in self._attempt_table.attempts:
                self._counters.late_rows += 1
                self._counters.late_tokens += len(own)
                continue  # it ended during the step: its tokens are discarded
            rows = self._decided(turn, own, now)
            turn.attempt.last_turn = self._counters.computed_tokens
            produced += [(turn.attempt, row) for row in rows]
        self._tell([(attempt.server, row) for attempt, row in produced])
        self._end_finished((attempt for attempt, _ in produced), now)

    def _decided(
        self, turn: GuessTurn, results: Sequence[Sampled | None], now: float
    ) -> list[TokenRow]:
        """Take the tokens that an attempt's rows chose, up to the first that differs from its
        guess.

        KV of wrong guesses lies beyond `num_computed_tokens` and is overwritten before it is read.
        """
        attempt = turn.attempt
        if not attempt.samples_next:
            attempt.num_computed_tokens += turn.num_rows
            return []
        rows: list[TokenRow] = []
        for sampled in results:
            assert sampled is not None, "a row that samples has a result"
            if sampled.barred is not None:
                # With a late mask the row computes the same token again in the next step.
                if sampled.barred is not Barred.LATE:
                    self._bar(attempt, sampled.barred, now)
                break
            rows.append(token_row(attempt.key, len(attempt.output_ids), sampled))
            attempt.num_computed_tokens += 1
            attempt.output_ids.append(sampled.token_id)
            if attempt.finish_reason(self._capacity.max_model_len) is not None:
                break
            if not turn.holds(len(rows) - 1, sampled.token_id):
                break
        attempt.unheard += rows
        if rows:
            self._speculation.went(turn, len(rows))
        return rows

    def _bar(self, attempt: DecodeAttempt, barred: Barred, now: float) -> None:
        """End an attempt that gets no token. If the model computed no numbers, the step is named:
        this worker is at fault, not the path to it."""
        reason, message = ENDS[barred]
        failed = FailedStep(self._counters.steps, 0) if barred is Barred.NOT_FINITE else NO_STEP
        self._attempt_table.end(attempt.key, reason, now, message, failed)

    def _take_chunk(
        self, chunk: PromptChunk[DecodeAttempt], sampled: Sampled | None, now: float
    ) -> None:
        attempt, num_tokens = chunk
        self._counters.computed_tokens += num_tokens
        self._counters.prompt_tokens += num_tokens
        if attempt.key not in self._attempt_table.attempts:
            self._counters.late_rows += 1
            return
        attempt.num_computed_tokens += num_tokens
        if attempt.num_remaining_tokens == 0:
            assert sampled is not None, "the last chunk of a prompt has a result"
            if sampled.barred is Barred.LATE:
                attempt.num_computed_tokens -= 1
                return
            if sampled.barred is not None:
                self._bar(attempt, sampled.barred, now)
                return
            self._counters.local_prompts += 1
            self._attempt_table.leases.step(attempt.key, LeaseEvent.COMPLETE)
            self._begin(attempt, token_row(attempt.key, 0, sampled), now)

    def join(self, attempt: DecodeAttempt, now: float) -> None:
        """Add an attempt with complete KV. It gets a row in the next step."""
        manifest = attempt.assembly.manifest
        assert manifest is not None, "complete without a manifest"
        attempt.num_computed_tokens = len(attempt.prompt_ids)
        self._begin(attempt, manifest.first, now)

    def _begin(self, attempt: DecodeAttempt, first: TokenRow, now: float) -> None:
        """Start an attempt with a computed prompt.

        The first token decides whether a replay can continue: it was sampled again, and must equal
        the one that the client already has.
        """
        if first.token_id >= self._engine.vocab_size:
            message = f"prefill chose token {first.token_id}, which is outside the vocabulary"
            self._attempt_table.end(attempt.key, EndReason.ERROR, now, message)
            return
        if attempt.replay_ids:
            if first.token_id != attempt.replay_ids[0]:
                message = (
                    f"the prompt's first token is {first.token_id} now and was "
                    f"{attempt.replay_ids[0]} before: the continuation would not be the same"
                )
                self._attempt_table.end(attempt.key, EndReason.ERROR, now, message)
                return
            attempt.output_ids += attempt.replay_ids
        else:
            attempt.output_ids.append(first.token_id)
            attempt.unheard.append(first)
            self._tell([(attempt.server, first)])
        self._awake[attempt.key] = attempt
        keep_prompt(self._engine.prefix_cache, attempt, self._engine.block_size)
        self.forks.complete(attempt)
        self._end_finished((attempt,), now)

    def credit(self, attempt: DecodeAttempt, row: CreditRow) -> None:
        """Process a credit row: how far an attempt may run, and what its server has received.

        A server that allows nothing new is waiting: send the rows that it lacks again, because they
        may have been lost without a trace.
        """
        attempt.unheard = [r for r in attempt.unheard if r.position >= row.received]
        if attempt.window.grant(row.allowed):
            lease = self._attempt_table.leases.get(attempt.key)
            if lease is not None and lease.state is LeaseState.PAUSED:
                self._awake[attempt.key] = attempt
        elif attempt.unheard:
            rows = attempt.unheard[:MAX_TOKEN_ROWS]
            self._tell((attempt.server, repeated) for repeated in rows)

    def _runnable(self) -> list[DecodeAttempt]:
        """Move leases between READY, RUNNING and PAUSED; return those that may have a row.

        A paused attempt sleeps until it gets credit and costs running ones nothing.
        """
        leases = self._attempt_table.leases
        runnable = []
        for key, attempt in tuple(self._awake.items()):
            lease = leases.get(key)
            state = None if lease is None else lease.state
            if state is LeaseState.READY:
                state = leases.step(key, LeaseEvent.START)
            if state is LeaseState.RUNNING and attempt.is_blocked:
                state = leases.step(key, LeaseEvent.PAUSE)
            elif state is LeaseState.PAUSED and not attempt.is_blocked:
                state = leases.step(key, LeaseEvent.RESUME)
            if state is LeaseState.RUNNING:
                runnable.append(attempt)
            else:
                del self._awake[key]
        # If there is nothing else to compute, the step itself waits for a mask.
        return [attempt for attempt in runnable if not attempt.is_awaiting_mask] or runnable

    def _room(self) -> GuessRoom:
        # Every attempt here may soon need another block: a guess must not cause a preemption.
        spare_blocks = self._engine.ledger.available_blocks - len(self._attempt_table.leases)
        return GuessRoom(
            max(0, spare_blocks), self._engine.block_size, self._capacity.max_model_len
        )

    def _tell(self, rows: Iterable[tuple[PeerId, TokenRow]]) -> None:
        """Send each server its rows of this step in one frame."""
        by_server: defaultdict[PeerId, list[TokenRow]] = defaultdict(list)
        for server, row in rows:
            by_server[server].append(row)
        for server, its_rows in by_server.items():
            frame = Tokens(self._counters.steps, tuple(its_rows))
            self._outbox.to_server(server.identity(), frame)

    def _end_finished(self, attempts: Iterable[DecodeAttempt], now: float) -> None:
        for attempt in attempts:
            reason = attempt.finish_reason(self._capacity.max_model_len)
            if reason is not None:
                self._attempt_table.end(attempt.key, reason, now)

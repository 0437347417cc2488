"""Attempts that share the prompt of another one: several completions of one prompt, computed once.

Knows who waits for whose prompt, and how its KV becomes several sequences': finished blocks are
shared by reference count, the one in which the completion begins is copied. Does not know how a
prompt's KV comes about, nor how tokens are chosen: of the prompt a fork computes the last token
again, as a prompt's, because nobody keeps what it is chosen from; so its completion is the one that
it would have had alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.frames import EndReason

if TYPE_CHECKING:
    from transport.frames import AttemptRow
    from triolet.ids import AttemptKey, PeerId
    from worker.engine_port import EnginePort
    from worker.roster import Roster

    from .attempt import Attempt
    from .prompts import Prompts


def num_shared_blocks(num_prompt_tokens: int, block_size: int) -> int:
    """Return how many leading blocks of a prompt a fork never writes: all but the last token's."""
    return (num_prompt_tokens - 1) // block_size


class Forks:
    """Who waits for whose prompt on one decode worker.

    Args:
      engine: whose blocks are shared and copied.
      roster: who holds a lease.
      prompts: where what a fork computes itself rides along.
    """

    def __init__(self, engine: EnginePort, roster: Roster[Attempt], prompts: Prompts) -> None:
        self._engine = engine
        self._roster = roster
        self._prompts = prompts
        self._waiting: dict[AttemptKey, list[Attempt]] = {}

    def origin(
        self, row: AttemptRow, server: PeerId, prompt_ids: tuple[int, ...], salt: bytes
    ) -> Attempt | None:
        """Return the attempt whose prompt is to be shared; None if it is not here, or not that."""
        origin = self._roster.attempts.get(row.key)
        if origin is None or origin.server != server or origin.salt != salt:
            return None
        return origin if origin.prompt_ids == prompt_ids else None

    def add(self, fork: Attempt, origin: Attempt) -> None:
        """Take an attempt that holds a lease of its own blocks; the shared ones come with the
        prompt, at once if that is here."""
        if origin.output_ids:
            self._part(fork, origin)
        else:
            self._waiting.setdefault(origin.key, []).append(fork)

    def complete(self, origin: Attempt) -> None:
        """Take in that the prompt of an attempt is here, before anything else comes of it."""
        for fork in self._waiting.pop(origin.key, ()):
            if fork.key in self._roster.attempts:
                self._part(fork, origin)

    def forsake(self, origin: Attempt, now: float) -> None:
        """An attempt ends: whoever still waits for its prompt has to begin anew."""
        for fork in self._waiting.pop(origin.key, ()):
            self._roster.end(fork.key, EndReason.FORSAKEN, now)

    def _part(self, fork: Attempt, origin: Attempt) -> None:
        num_shared = fork.num_held_blocks
        self._engine.copy_block(origin.block_table[num_shared], fork.block_table[0])
        shared = origin.block_table[:num_shared]
        self._engine.ledger.extend(fork.key, 0, shared)
        fork.block_table[:0] = shared
        fork.num_computed_tokens = len(fork.prompt_ids) - 1
        self._prompts.add(fork)

"""What a client's grammar may cost, before it is queued and while it is followed: each bound with
its reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config_queue import TurnsConfig
from .units import KIB, MIB, MILLISECONDS, SECONDS


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """Bounds on grammars that clients send, checked before a request is queued."""

    max_bytes: int = 16 * KIB
    """Of one schema, expression or grammar: what people write is far smaller."""
    max_depth: int = 32
    """Of nested brackets: compilers recurse."""
    cpu_s: float = 50 * MILLISECONDS
    """For compiling, in a process that is ended then, whatever it does. Real schemas take 1 to
    5 ms; in a worker a grammar is compiled beside running streams. Where these have every core,
    it gets a part of one, and takes as much longer by the clock."""
    walk_tokens: int = 32
    """Tokens of each walk through a compiled grammar: an ambiguous one passes every bound at its
    first token and exceeds them at some tenth one. What a walk does not reach, a worker bounds."""
    walk_cpu_s: float = 20 * MILLISECONDS
    """For all walks through one grammar; they stop there without a verdict. 0.1 ms per mask with a
    small vocabulary: a real schema's walks end before."""
    walk_mask_cpu_s: float = 30 * MILLISECONDS
    """For one mask of a walk; one that takes longer is too costly. Real ones take up to 6 ms with
    a vocabulary of 65,000 tokens (an object of 200 optional properties)."""
    memory_bytes: int = 512 * MIB
    """That compiling may take on top of what the process has."""
    wait_s: float = 5.0 * SECONDS
    """For a turn and for the result: grammars are compiled one at a time. Beyond it the request is
    refused as overload, and a process that does not answer is ended."""
    max_waiting: int = 1024
    """Grammars that may wait for their turn, of all tenants: full lines of sixteen of them."""
    max_waiting_each: int = 64
    """Of one tenant, or of one client address where there are no tenants: at 5 ms each a third of a
    second, and the costliest that there are 3 s. The next one gets a 429. Requests of one tenant
    that bring the same grammar at once are one."""
    max_remembered: int = 1024
    """Verdicts that are kept: clients send the same grammar again and again."""

    @property
    def turns(self) -> TurnsConfig:
        """Bounds of the lines."""
        return TurnsConfig(self.max_waiting, self.max_waiting_each)


@dataclass(frozen=True, slots=True)
class MaskConfig:
    """Bounds on what a worker spends to follow grammars. Times are of the processor, so that a busy
    machine ends no completion; only `*_wait_s` are by the clock."""

    compile_cpu_s: float = 200 * MILLISECONDS
    """For compiling one grammar: four times what the check before the queue allows, for a worker
    may have a slower core. Beyond it the grammar is too costly."""
    step_wait_share: float = 0.5
    """A step waits for masks that are still missing for at most this share of its own computing:
    rows without a grammar have gaps of at most 1.5 steps. A row with a late mask computes its
    token again with the next step."""
    least_wait_s: float = 2 * MILLISECONDS
    """The same, at least: a mask takes some 0.1 ms, but its thread has to wake."""
    alone_wait_s: float = 20 * MILLISECONDS
    """The same, for a step of one sequence alone or of slow ones: only what comes meanwhile, a
    cancel or a new prompt, waits for it."""
    launched_wait_s: float = 10 * MILLISECONDS
    """The same for steps that are launched and not timed: about a step of a GPU."""
    slow_mask_cpu_s: float = 2 * MILLISECONDS
    """A sequence with a mask that took longer has its next ones computed in the slow thread, where
    it delays its like alone, and steps with other rows do not wait for it at all."""
    slow_niceness: int = 5
    """Of the slow thread: that of the device's (`EngineConfig.niceness`). No more, for it holds the
    interpreter's lock at times, and the device waits for the thread that holds that."""
    straggler_niceness: int = 10
    """Of a thread that only ends a mask of an ended sequence."""
    mask_cpu_s: float = 100 * MILLISECONDS
    """For one mask; beyond it the sequence ends, without waiting for the mask. The library's bounds
    are looked at between two rows of a parse, and one row may take long."""
    burst_cpu_s: float = 500 * MILLISECONDS
    """For all masks of a sequence, on top of `token_cpu_s` per token."""
    token_cpu_s: float = 4 * MILLISECONDS
    """For all masks of a sequence, per token of its completion; real ones take 0.1 ms, and 3 ms in
    the worst place of the widest objects."""
    replay_cpu_s: float = 10 * MILLISECONDS
    """Of one turn in which tokens that the client has already are followed; the rest comes in the
    sequence's next turns, so that others get theirs between."""
    max_stragglers: int = 4
    """Threads that may be left to end masks of ended sequences: a mask cannot be broken
    off. With so many, a thread that hangs is not replaced before one of them ends."""

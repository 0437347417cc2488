"""What the queue means for one who is not in it: what goes before it, and whether there is a place.

Pure. Asked of everybody who comes, so nothing here looks at all who wait. Knows the queue's counts;
changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from triolet.service_class import DEFAULT_SCHEDULING, Scheduling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config import QueueConfig

    from .class_queue import ClassLine
    from .fair_queue import FairQueue


def heeded(
    config: QueueConfig, scheduling: Scheduling, own: int, due: float
) -> tuple[Scheduling, int, float]:
    """Return what counts of a scheduling: without fairness only its rank among all."""
    if config.fair:
        return scheduling, own, due
    return DEFAULT_SCHEDULING, scheduling.priority(own), 0.0


def is_modest(
    queue: FairQueue[Any], scheduling: Scheduling, sizes: Iterable[tuple[int, float]]
) -> bool:
    """Return whether a tenant asks for so much less than its share, beside others, that
    what gives way to them need not be its own. Alone nobody does.

    Args:
      queue: of all that wait.
      scheduling: whose.
      sizes: of newcomers, on top of what waits: prompt tokens, and the most of the completion.
    """
    scheduling, _, _ = heeded(queue.config, scheduling, 0, 0.0)
    line = queue.lines[scheduling.service_class]
    has_others = len(line) > (line.find(scheduling.tenant) is not None)
    completion_tokens = queue.holdings.completion_tokens(scheduling.tenant)
    cost = sum(prompt + min(most, completion_tokens) for prompt, most in sizes)
    return has_others and head_start_of(line, scheduling, cost) > 0.0


def crowd(queue: FairQueue[Any], scheduling: Scheduling, count: int, most: int) -> int:
    """Return how many wait of a class and of those above, where there is no place for so many more:
    `most` would be exceeded, and so would its tenant's part of these by weight. 0 if there is a
    place; a line that is empty moves, and has one for as many as come."""
    scheduling, _, _ = heeded(queue.config, scheduling, 0, 0.0)
    lines = queue.lines[: scheduling.service_class + 1]
    num_before = sum(line.num_waiting for line in lines)
    if num_before + count <= most:
        return 0
    num_own = sum(len(line.find(scheduling.tenant) or ()) for line in lines)
    part = queue.holdings.part(scheduling.tenant, scheduling.weight)
    return num_before if num_own + count > most * part else 0


def tokens_ahead_in(
    line: ClassLine[Any], scheduling: Scheduling, own: int, due: float, cost: float
) -> int:
    """Return the prompt tokens of its class that go before a newcomer, as things stand: its
    tenant's own, and what the others have meanwhile, and until its own turn: of those whose turn is
    at the same virtual time, a turn of its cost long, half are before it."""
    flow = line.find(scheduling.tenant)
    before, virtual_tokens = 0, cost / (2 * scheduling.weight)
    if flow is not None:
        virtual_tokens += max(flow.charged - line.virtual_time, 0.0)
        if flow and (before := flow.tokens_before(own, due)):
            virtual_tokens += flow.cost * before / flow.prompt_tokens / scheduling.weight
    virtual_tokens = max(virtual_tokens - head_start_of(line, scheduling, cost), 0.0)
    return before + int(line.fluid.prompt_tokens_within(virtual_tokens, flow))


def head_start_of(line: ClassLine[Any], scheduling: Scheduling, cost: float) -> float:
    """Return by how much the turn of a newcomer would be earlier: by the head start, if its tenant
    left so much unused that this covers all that would wait."""
    flow = line.find(scheduling.tenant)
    credit, waiting = float(line.head_start), 0
    if flow is not None:
        credit, waiting = flow.credit_at(line.virtual_time, line.head_start), flow.cost
    return line.head_start if waiting + cost <= credit * scheduling.weight else 0.0

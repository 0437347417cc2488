"""Which models hold memory, and which give theirs up for another one. Pure: no I/O, no clock.

Memory is what a model's workers take while they run, of this machine and of each GPU, which have
budgets of their own. A model that is pinned, busy or young keeps
it; of the others that one goes first for which idle_time × size / reload_time is largest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from triolet.control_protocol import ModelState

from .model_states import HOLDING, RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HOST: Final = "host"
"""The place of this machine's memory; those of GPUs are their UUIDs."""
LEAST_RELOAD_S: Final = 0.1
"""A shorter measured reload would make a score of almost any size."""
EWMA_WEIGHT: Final = 0.3
"""Of the last measurement: three loads under another load of the machine move the prediction by
two thirds."""
FIRST_LOAD_S: Final = 2.0
"""Start of a process, before any load was measured."""
FIRST_BYTES_PER_S: Final = 400e6
"""From a common disk, before any load was measured."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model as residency sees it.

    Attributes:
      name: of the model.
      state: now.
      size_bytes: of its workers, while they run.
      is_pinned: keeps its memory whatever others want.
      num_requests: that run or wait for it.
      since: when it was last told to load.
      last_used_at: when the last request came or ended, or `since` if that is later.
      reload_s: predicted time to load it again.
      keep_alive_s: for which it stays without a request; None for ever.
      gpu_bytes: of GPUs' memory, while they run, by UUID.
      busy_s: for which it has had requests without a pause.
    """

    name: str
    state: ModelState
    size_bytes: int
    is_pinned: bool
    num_requests: int
    since: float
    last_used_at: float
    reload_s: float
    keep_alive_s: float | None = None
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)
    busy_s: float = 0.0

    def bytes_at(self, place: str) -> int:
        """Return the memory of a place that it takes while it runs."""
        return self.size_bytes if place == HOST else self.gpu_bytes.get(place, 0)

    @property
    def is_holding(self) -> bool:
        """Whether it holds memory now."""
        return self.state in HOLDING


@dataclass(frozen=True, slots=True)
class Fits:
    """There is room.

    Attributes:
      evict: names of models that have to end first; empty where the model can load now.
    """

    evict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Later:
    """There will be room once others are idle, old enough, or have ended.

    Attributes:
      because: names of these models.
    """

    because: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Never:
    """It does not fit beside what is pinned.

    Attributes:
      size_bytes: that it takes.
      pinned_bytes: that pinned models hold.
      budget_bytes: of all models.
      place: of this memory.
    """

    size_bytes: int
    pinned_bytes: int
    budget_bytes: int
    place: str = HOST


def held_bytes(models: Iterable[Resident], place: str = HOST) -> int:
    """Return the memory of a place that models hold together."""
    return sum(model.bytes_at(place) for model in models if model.is_holding)


def excess_bytes(
    models: Sequence[Resident], budgets: Mapping[str, int], wanted: Resident | None = None
) -> dict[str, int]:
    """Return by how much models exceed the budgets, by place; places that they do not are left out.

    Args:
      models: that may hold memory.
      budgets: by place.
      wanted: holds none, and is to beside them: places of which it needs nothing do not count.
    """
    excess = {}
    for place, budget_bytes in budgets.items():
        needed_bytes = 0 if wanted is None else wanted.bytes_at(place)
        if wanted is None or needed_bytes:
            excess[place] = needed_bytes + held_bytes(models, place) - budget_bytes
    return {place: num_bytes for place, num_bytes in excess.items() if num_bytes > 0}


def score(model: Resident, now: float) -> float:
    """Return idle_time × size / reload_time [s × bytes / s]: the model with the largest is evicted
    first."""
    idle_s = max(0.0, now - model.last_used_at)
    size_bytes = model.size_bytes + sum(model.gpu_bytes.values())
    return idle_s * size_bytes / max(model.reload_s, LEAST_RELOAD_S)


def may_evict(model: Resident, now: float, min_residency_s: float) -> bool:
    """Return whether a model's memory may be taken for another one."""
    is_idle = model.state in RUNNING and not model.num_requests
    return is_idle and not model.is_pinned and now - model.since >= min_residency_s


def make_room(
    wanted: Resident,
    models: Sequence[Resident],
    budgets: Mapping[str, int],
    now: float,
    min_residency_s: float,
    turn_s: float | None = None,
) -> Fits | Later | Never:
    """Return how a model gets its memory.

    Args:
      wanted: holds no memory now.
      models: all of them; `wanted` may be among them.
      budgets: of all models, by place.
      now: the time.
      min_residency_s: for which a model keeps its memory.
      turn_s: of a load that comes first; None of any other. Idle models end for it also where that
        is not enough yet: no other load takes what they leave. None ends where models that were
        busy for so long keep too much.
    """
    others = [model for model in models if model.name != wanted.name]
    pinned = [model for model in others if model.is_pinned]
    for place in excess_bytes(pinned, budgets, wanted):
        size_bytes, pinned_bytes = wanted.bytes_at(place), held_bytes(pinned, place)
        return Never(size_bytes, pinned_bytes, budgets[place], place)
    if not excess_bytes(others, budgets, wanted):
        return Fits()
    leaving = [model for model in others if model.state is ModelState.DRAINING]
    staying = [model for model in others if model not in leaving]
    missing_bytes = excess_bytes(staying, budgets, wanted)
    if not missing_bytes:
        return Later(tuple(model.name for model in leaving))
    evicted = choose_evicted(others, missing_bytes, now, min_residency_s)
    lasting = [one for one in staying if one.is_pinned or one.busy_s >= (turn_s or 0.0)]
    if not evicted and turn_s is not None and not excess_bytes(lasting, budgets, wanted):
        useful = [one for one in others if any(map(one.bytes_at, missing_bytes))]
        evicted = tuple(one.name for one in useful if may_evict(one, now, min_residency_s))
    if evicted:
        return Fits(evicted)
    kept = [one for one in others if one.is_holding and not one.is_pinned]
    return Later(tuple(model.name for model in kept))


def choose_evicted(
    models: Iterable[Resident], missing_bytes: Mapping[str, int], now: float, min_residency_s: float
) -> tuple[str, ...]:
    """Return which models end so that `missing_bytes` are free at each place; none if they cannot
    be.

    The highest scores go first; what is not needed in the end, because a later one is large,
    stays.
    """

    def lacking(models: Sequence[Resident]) -> list[str]:
        return [one for one, least in missing_bytes.items() if held_bytes(models, one) < least]

    candidates = [model for model in models if may_evict(model, now, min_residency_s)]
    candidates.sort(key=lambda model: (-score(model, now), model.name))
    chosen: list[Resident] = []
    for model in candidates:
        if any(model.bytes_at(place) for place in lacking(chosen)):
            chosen.append(model)
    if lacking(chosen):
        return ()
    for model in reversed(chosen[:]):
        rest = [one for one in chosen if one is not model]
        if not lacking(rest):
            chosen = rest
    return tuple(model.name for model in chosen)


def is_expired(model: Resident, now: float) -> bool:
    """Return whether a model's keep-alive is over."""
    is_idle = model.state in RUNNING and not model.num_requests and not model.is_pinned
    return (
        is_idle
        and model.keep_alive_s is not None
        and now - model.last_used_at >= model.keep_alive_s
    )


class LoadTimes:
    """Predicted load times: an exponentially weighted mean of measured ones, by model and by the
    state that it was loaded from.

    Args:
      known: seconds by (model, state), as of an earlier process.
    """

    def __init__(self, known: dict[tuple[str, ModelState], float] | None = None) -> None:
        self.seconds = dict(known or {})

    def add(self, name: str, origin: ModelState, took_s: float) -> float:
        """Take in a measured load and return the new mean [s]."""
        before = self.seconds.get((name, origin), took_s)
        mean_s = before + EWMA_WEIGHT * (took_s - before)
        self.seconds[name, origin] = mean_s
        return mean_s

    def forget(self, name: str) -> None:
        """Forget a model that was dropped."""
        self.seconds = {key: s for key, s in self.seconds.items() if key[0] != name}

    def predict(self, name: str, origin: ModelState, size_bytes: int) -> float:
        """Return how long a load will take [s]; without a measurement of this state that of
        another one, and without any a guess from the size."""
        measured = self.seconds.get((name, origin))
        if measured is None:
            others = [s for (one, _), s in self.seconds.items() if one == name]
            measured = max(others, default=None)
        return FIRST_LOAD_S + size_bytes / FIRST_BYTES_PER_S if measured is None else measured

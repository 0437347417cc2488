"""Eviction policy: decides which models stop to make memory for another one. No I/O, no clock.

This machine and each GPU have their own budget. Pinned, busy and recently loaded models stay; of
the others, the model with the largest idle_time × size / reload_time is evicted first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from transport.control_protocol import ModelState

from .model_states import HOLDING, RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

HOST: Final = "host"
"""Place name of this machine's memory. The place name of a GPU is its UUID."""
LEAST_RELOAD_S: Final = 0.1
"""Lower bound of the reload time in the score, against division by almost zero."""
EWMA_WEIGHT: Final = 0.3
"""Weight of the newest load time: three loads move the prediction by two thirds."""
FIRST_LOAD_S: Final = 2.0
"""Assumed start of a process until a load was measured."""
FIRST_BYTES_PER_S: Final = 400e6
"""Assumed speed of the disk until a load was measured."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model as input of the eviction policy.

    Attributes:
      name: name of the model.
      state: current state.
      size_bytes: memory of its workers while they run.
      is_pinned: whether it is never evicted.
      num_requests: running and waiting requests.
      since: time of the last load.
      last_used_at: when the last request arrived or ended, or `since` if that is later.
      reload_s: predicted time of a reload.
      keep_alive_s: idle time after which it sleeps; None for never.
      gpu_bytes: GPU memory of its workers while they run, by UUID.
      busy_s: how long it has had requests without a pause.
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
        """Return its memory in a place while it runs."""
        return self.size_bytes if place == HOST else self.gpu_bytes.get(place, 0)

    @property
    def is_holding(self) -> bool:
        """Whether its workers hold memory now."""
        return self.state in HOLDING


@dataclass(frozen=True, slots=True)
class Fits:
    """The model fits.

    Attributes:
      evict: models to evict first; empty if the model can load now.
    """

    evict: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Later:
    """The model fits once others are idle, old enough, or have ended.

    Attributes:
      because: names of these models.
    """

    because: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Never:
    """The model does not fit beside the pinned models.

    Attributes:
      size_bytes: memory of the model.
      pinned_bytes: memory of the pinned models.
      budget_bytes: budget of all models.
      place: place of this memory.
    """

    size_bytes: int
    pinned_bytes: int
    budget_bytes: int
    place: str = HOST


def held_bytes(models: Iterable[Resident], place: str = HOST) -> int:
    """Return the memory that models hold in a place."""
    return sum(model.bytes_at(place) for model in models if model.is_holding)


def excess_bytes(
    models: Sequence[Resident], budgets: Mapping[str, int], wanted: Resident | None = None
) -> dict[str, int]:
    """Return the bytes by which models exceed the budgets, for each place where they do.

    Args:
      models: models that may hold memory.
      budgets: bytes by place.
      wanted: a model to load beside them; only the places that it needs are checked.
    """
    excess = {}
    for place, budget_bytes in budgets.items():
        needed_bytes = 0 if wanted is None else wanted.bytes_at(place)
        if wanted is None or needed_bytes:
            excess[place] = needed_bytes + held_bytes(models, place) - budget_bytes
    return {place: num_bytes for place, num_bytes in excess.items() if num_bytes > 0}


def score(model: Resident, now: float) -> float:
    """Return idle_time × size / reload_time [bytes]. The largest score is evicted first."""
    idle_s = max(0.0, now - model.last_used_at)
    size_bytes = model.size_bytes + sum(model.gpu_bytes.values())
    return idle_s * size_bytes / max(model.reload_s, LEAST_RELOAD_S)


def may_evict(model: Resident, now: float, min_residency_s: float) -> bool:
    """Return whether a model may be evicted for another one."""
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
      wanted: model to load, which holds no memory.
      models: all models; may include `wanted`.
      budgets: bytes by place.
      now: current time.
      min_residency_s: time for which a loaded model cannot be evicted.
      turn_s: length of the turn if this load has its turn, else None. Idle models are then evicted
        even if that is not enough yet, because no other load takes their memory. Nothing is
        evicted if models that were busy for the whole turn keep too much.
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
    """Return the models to evict to free `missing_bytes` in each place; empty if impossible.

    Takes the highest scores first, then spares models that turn out not to be needed because a
    later one is large.
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
    """Return whether a model has been idle for its keep-alive time."""
    is_idle = model.state in RUNNING and not model.num_requests and not model.is_pinned
    return (
        is_idle
        and model.keep_alive_s is not None
        and now - model.last_used_at >= model.keep_alive_s
    )


class LoadTimes:
    """Predicts load times: the exponentially weighted mean of measured ones by model and origin
    state.

    Args:
      known: seconds by (model, state) of an earlier process.
    """

    def __init__(self, known: dict[tuple[str, ModelState], float] | None = None) -> None:
        self.seconds = dict(known or {})

    def add(self, name: str, origin: ModelState, took_s: float) -> float:
        """Add a measured load time and return the new mean [s]."""
        before = self.seconds.get((name, origin), took_s)
        mean_s = before + EWMA_WEIGHT * (took_s - before)
        self.seconds[name, origin] = mean_s
        return mean_s

    def forget(self, name: str) -> None:
        """Forget a model that was dropped."""
        self.seconds = {key: s for key, s in self.seconds.items() if key[0] != name}

    def predict(self, name: str, origin: ModelState, size_bytes: int) -> float:
        """Return the expected time of a load [s]. Falls back to another origin state, then to a
        guess from the size."""
        measured = self.seconds.get((name, origin))
        if measured is None:
            others = [s for (one, _), s in self.seconds.items() if one == name]
            measured = max(others, default=None)
        return FIRST_LOAD_S + size_bytes / FIRST_BYTES_PER_S if measured is None else measured

"""Predicts memory use and load times of a fleet's models: whether a model fits, and when it can
serve. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from transport.control_protocol import ModelNews, ModelState
from triolet.units import show_size

from .model_states import RESTING, RUNNING
from .operations import NoRoom
from .residency import (
    HOST,
    Fits,
    Later,
    LoadTimes,
    Never,
    Resident,
    excess_bytes,
    make_room,
)
from .turns import OperationTurns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from triolet.config import ControlConfig

    from .models import Model

RETRY_S: Final = 10.0
"""Time after a failed load in which requests do not start another one, because each attempt takes
memory and cores from other models."""


class Outlook:
    """A read-only view of the models of one fleet.

    Args:
      config: timeouts.
      budgets: bytes for the workers of all models, by place.
      models: models by name.
      load_times: measured load times.
      began_at: when control started.

    Attributes:
      turns: chooses which waiting load comes first.
    """

    def __init__(
        self,
        config: ControlConfig,
        budgets: Mapping[str, int],
        models: Mapping[str, Model],
        load_times: LoadTimes,
        began_at: float,
    ) -> None:
        self._config = config
        self._budgets = budgets
        self._models = models
        self._load_times = load_times
        self._began_at = began_at
        self.turns = OperationTurns(config)

    def residents(self, now: float) -> list[Resident]:
        """Return the models as input for residency decisions."""
        return [self._resident(model, now) for model in self._models.values()]

    def news(self, now: float) -> tuple[ModelNews, ...]:
        """Return the model states to publish to servers."""
        news = []
        for name, model in self._models.items():
            owner = self._models.get(model.config.workers_of, model)
            predicted_s, size_bytes = self._predict(owner, now), model.size_bytes
            news.append(ModelNews(name, model.config.digest, owner.state, predicted_s, size_bytes))
        return tuple(news)

    def room(self, model: Model, now: float) -> Fits | Later | Never:
        """Return how a model gets its memory. It waits for the load that has its turn."""
        min_s, first = self._config.min_residency_s, self.turns.first
        wanted, models = self._resident(model, now), self.residents(now)
        # A model that was busy for a whole turn will not be idle within one.
        turn_s = self._config.turn_s if first is model else None
        room = make_room(wanted, models, self._budgets, now, min_s, turn_s)
        if first is None or first is model or isinstance(room, Never):
            return room
        if first.state not in RESTING:  # it has begun and holds its memory
            return room
        lacking = excess_bytes(models, self._budgets, self._resident(first, now))
        # A load in other places than the first one lacks does not delay it.
        return Later((first.config.name,)) if any(map(wanted.bytes_at, lacking)) else room

    def load_s(self, model: Model) -> float:
        """Return the predicted time of a load from its current state, or from sleep [s]."""
        origin = model.state if model.state in RESTING else ModelState.SLEEPING
        return self._load_times.predict(model.config.name, origin, model.size_bytes)

    def refuse_hopeless(self, model: Model, now: float) -> None:
        """Check that a model can be loaded at some time.

        Raises:
          NoRoom: it never can; the text has the figures and the remedy.
        """
        if model.state is ModelState.ABSENT:
            raise NoRoom(absent(model))
        if model.state in RESTING:
            room = self.room(model, now)
            if isinstance(room, Never):
                raise NoRoom(self.too_large(model, room))

    def too_large(self, model: Model, room: Never) -> str:
        """Return an error text: why a model does not fit, and what to do."""
        others = [one for one in self._models.values() if one is not model]
        pinned = [one.config.name for one in others if one.is_pinned]
        beside = f", of which {', '.join(pinned)} (pinned, or replaced only once it is ready) hold "
        beside = f"{beside}{show_size(room.pinned_bytes)}" if room.pinned_bytes else ""
        where = "" if room.place == HOST else f" of the GPU {room.place}"
        field = "control.memory_bytes" if room.place == HOST else "control.gpu_memory_share"
        return (
            f"{model.config.name} takes {show_size(room.size_bytes)}{where} and does not fit: the "
            f"budget is {show_size(room.budget_bytes)}{beside}; raise {field}, unset `pinned` of a "
            "model, or give this one fewer workers or a smaller KV pool"
        )

    def is_failing(self, model: Model, now: float) -> bool:
        """Return whether a load failed recently."""
        return model.failed_at is not None and now - model.failed_at < RETRY_S

    def _resident(self, model: Model, now: float) -> Resident:
        # Count an operation, and a server that may not have reported yet, as a request.
        is_unknown = now - self._began_at < self._config.silence_s
        num_requests = model.num_requests + (model.live is not None) + is_unknown
        return Resident(
            model.config.name,
            model.state,
            model.size_bytes,
            model.is_pinned,
            num_requests,
            model.since,
            max(model.last_used_at, model.since),
            self.load_s(model),
            None if model.config.workers_of else model.config.keep_alive_s,
            model.gpu_bytes,
            0.0 if model.busy_since is None else now - model.busy_since,
        )

    def _predict(self, model: Model, now: float) -> float | None:
        """Return the seconds until a model serves if it is loaded now, or None if unknown."""
        if model.state in RUNNING:
            return 0.0
        load_s = self.load_s(model)
        if model.state is ModelState.LOADING:
            load_s = self._load_times.predict(model.config.name, model.origin, model.size_bytes)
            return max(0.0, load_s - (now - model.changed_at))
        if model.state is ModelState.DRAINING:
            return load_s
        if model.state is ModelState.ABSENT or self.is_failing(model, now):
            return None
        match self.room(model, now):
            case Never():
                return None
            case Later(names):
                return load_s + self._room_in_s(names, now)
        return load_s

    def _room_in_s(self, names: Iterable[str], now: float) -> float:
        """Return the seconds until all these models are old enough to be evicted."""
        min_s, first = self._config.min_residency_s, self.turns.first
        models = [self._models[name] for name in names]
        # The load that has its turn has not begun.
        ages_s = [0.0 if one is first else now - one.since for one in models]
        return max(0.0, *(min_s - age_s for age_s in ages_s)) if ages_s else 0.0


def absent(model: Model) -> str:
    """Return an error text for a model without files."""
    return (
        f"the files of {model.config.name} are missing from {model.config.model_dir}; restore them "
        "and load it again"
    )

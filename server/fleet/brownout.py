"""How much is given up while there is too much: a ladder of levels, climbed and left slowly.

Pure: pressures and time in, a level out. Each level takes what those below it take. One step at a
time, each after its pressure has lasted, and down again only well below where it began, so that a
level never flickers. Knows no queue and no requests.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from triolet.service_class import ServiceClass
from triolet.units import SECONDS

if TYPE_CHECKING:
    from triolet.config_overload import BrownoutConfig

SMOOTHING_S: Final = 0.5 * SECONDS
"""Over which pressures are averaged: the wait jumps with every long prompt."""


class Level(IntEnum):
    """What is given up."""

    NORMAL = 0
    CAP_SHEDDABLE = 1
    """Answers to sheddable requests are short."""
    PAUSE_BATCH = 2
    """Batches stand still."""
    CAP_DEFAULT = 3
    """Answers of the default class are short too, and very long prompts are refused."""
    CRITICAL_ONLY = 4
    """Everything else is refused."""


class Brownout:
    """The level of one server.

    Args:
      config: thresholds and times.
      now: the time of the start.

    Attributes:
      level: as of the last call.
    """

    def __init__(self, config: BrownoutConfig, now: float) -> None:
        self.level = Level.NORMAL
        self._config = config
        self._pressure = self._critical_pressure = 0.0
        self._advanced_at = self._changed_at = self._steady_since = now

    @property
    def pressure(self) -> float:
        """The default class's, smoothed."""
        return self._pressure

    def advance(self, pressure: float, critical_pressure: float, now: float) -> bool:
        """Let time pass; return whether the level changed.

        Args:
          pressure: predicted wait of a newcomer of the default class, of what it may wait.
          critical_pressure: the same for the critical class.
          now: the time.
        """
        if not self._config.is_on:
            return False
        kept = math.exp(-(now - self._advanced_at) / SMOOTHING_S)
        self._advanced_at = now
        self._pressure = kept * self._pressure + (1 - kept) * pressure
        self._critical_pressure = kept * self._critical_pressure + (1 - kept) * critical_pressure
        step = self._wanted_step()
        if step == 0:
            self._steady_since = now
            return False
        after_s = self._config.rise_after_s if step > 0 else self._config.fall_after_s
        if now - max(self._steady_since, self._changed_at) < after_s:
            return False
        self.level = Level(self.level + step)
        self._changed_at = now
        return True

    def max_tokens(self, service_class: ServiceClass) -> int | None:
        """Return how long answers of a class may get; None for no cap."""
        if service_class is ServiceClass.SHEDDABLE and self.level >= Level.CAP_SHEDDABLE:
            return self._config.sheddable_max_tokens
        if service_class is ServiceClass.DEFAULT and self.level >= Level.CAP_DEFAULT:
            return self._config.default_max_tokens
        return None

    def refuses(
        self, service_class: ServiceClass, prompt_tokens: int, *, is_modest: bool = False
    ) -> bool:
        """Return whether a request is refused for what it is. The long prompts of a tenant that
        asks for less than its share (`is_modest`) are not what is too much."""
        if service_class is ServiceClass.CRITICAL:
            return False
        if self.level >= Level.CRITICAL_ONLY:
            # Batches are paused, which costs nobody anything; refused they would fail.
            return service_class is not ServiceClass.BATCH
        is_long = prompt_tokens > self._config.long_prompt_tokens and not is_modest
        is_paused = service_class is ServiceClass.BATCH
        return self.level >= Level.CAP_DEFAULT and is_long and not is_paused

    @property
    def pauses_batch(self) -> bool:
        """Whether batches stand still."""
        return self.level >= Level.PAUSE_BATCH

    def _wanted_step(self) -> int:
        """Return +1, -1 or 0."""
        if self.level < Level.CRITICAL_ONLY and self._reaches(Level(self.level + 1), 1.0):
            return 1
        if self.level > Level.NORMAL and not self._reaches(self.level, self._config.fall_share):
            return -1
        return 0

    def _reaches(self, level: Level, share: float) -> bool:
        """Return whether pressure is at least this share of where a level, or one above it,
        begins."""
        config = self._config
        if self._critical_pressure >= share * config.critical_only_at:
            return True
        begins_at = {
            Level.CAP_SHEDDABLE: config.cap_sheddable_at,
            Level.PAUSE_BATCH: config.pause_batch_at,
            Level.CAP_DEFAULT: config.cap_default_at,
        }.get(level)
        return begins_at is not None and self._pressure >= share * begins_at

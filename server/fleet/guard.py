"""The outer bound on what is taken on: how many prompt tokens may be owed a first token at once.

Pure. It trusts no prediction, only what came of what was taken on: the share of first tokens that
came late, after what their prompts take by themselves is taken off (so that long prompts do not
look like overload). Multiplied down when they do, up a little when they do not and the limit was
felt. Knows no workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.service_class import ServiceClass

if TYPE_CHECKING:
    from triolet.config_overload import GuardConfig, SloConfig

LEAST_SAMPLES: Final = 16
"""First tokens without which a window says nothing and goes on: one late among few is chance."""
LATE: Final = 1.1
"""Of what a class may wait: what is later was not meant by anybody. Up to there predictions are
off now and then."""
MODEST_ROOM: Final = 2
"""Times the limit, up to which those are let in who go before what it was reached by."""
FORGET_WINDOWS: Final = 60
"""Good windows in which it held nobody back, after which there is no limit: the trouble that it was
found in is over."""


class Guard:
    """The limit of one server.

    Args:
      config: how it moves.
      slo: which classes have one: what others are owed makes nobody late.
      now: the time of the start.

    Attributes:
      limit_tokens: that may be owed; None as long as nothing came late.
    """

    def __init__(self, config: GuardConfig, slo: SloConfig, now: float) -> None:
        self.limit_tokens: float | None = None
        self._owed = [0] * len(ServiceClass)
        self._is_timed = [slo.of(one) is not None for one in ServiceClass]
        self._config = config
        self._began_at = now
        self._was_felt = False
        self._num_first = self._num_late = self._most_owed = self._num_unfelt = 0

    @property
    def owed_tokens(self) -> int:
        """Prompt tokens of what was taken on and has no first token yet."""
        return sum(self._owed)

    def admits(
        self, service_class: ServiceClass, num_tokens: int, *, is_modest: bool = False
    ) -> bool:
        """Return whether so many more prompt tokens may be owed to a class and those above it,
        which are all that it waits for. Nobody is refused alone; whoever is, has felt the limit.
        Beyond it there is room for tenants that ask for less than their shares (`is_modest`)."""
        if not self._config.is_on or self.limit_tokens is None:
            return True
        owed = sum(self._owed[: service_class + 1])
        limit = self.limit_tokens * (MODEST_ROOM if is_modest else 1)
        is_admitted = not owed or owed + num_tokens <= limit
        self._was_felt = self._was_felt or not is_admitted
        return is_admitted

    def took(self, service_class: ServiceClass, num_tokens: int) -> None:
        """Count what was taken on."""
        self._owed[service_class] += num_tokens
        self._most_owed = max(self._most_owed, self._timed_tokens)

    def gave(self, service_class: ServiceClass, num_tokens: int) -> None:
        """Count out what has its first token, or its end without one."""
        self._owed[service_class] -= num_tokens

    def came(self, share: float, now: float) -> None:
        """Judge a first token.

        Args:
          share: what it waited beyond its own computing, of what its class may wait.
          now: the time.
        """
        self._num_first += 1
        self._num_late += share > LATE
        if now - self._began_at >= self._config.window_s and self._num_first >= LEAST_SAMPLES:
            self._close_window(now)

    def _close_window(self, now: float) -> None:
        config = self._config
        if self._num_late > config.late_share * self._num_first:
            base = self._most_owed if self.limit_tokens is None else self.limit_tokens
            self.limit_tokens = max(config.fall * min(base, self._most_owed), config.least_tokens)
            self._num_unfelt = 0
        elif self.limit_tokens is not None:
            if self._was_felt:
                self.limit_tokens *= config.rise
                self._num_unfelt = 0
            else:
                self._num_unfelt += 1
                if self._num_unfelt >= FORGET_WINDOWS:
                    self.limit_tokens = None
        self._began_at = now
        self._num_first = self._num_late = 0
        self._most_owed = self._timed_tokens
        self._was_felt = False

    @property
    def _timed_tokens(self) -> int:
        """Those owed to classes with a deadline for first tokens."""
        return sum(n for n, is_timed in zip(self._owed, self._is_timed, strict=True) if is_timed)

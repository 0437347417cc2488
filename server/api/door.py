"""Bounds at the door: rates, the room that bodies take, the pace and the log of refusals."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

import structlog

from triolet.errors import RequestError, overloaded, too_many_waiting
from triolet.units import MIB

if TYPE_CHECKING:
    from triolet.config import DoorConfig


class TokenBucket:
    """Allows `per_s` events a second, and as many at once."""

    def __init__(self, per_s: float, now: float) -> None:
        self._per_s = per_s
        self._tokens = per_s
        self._filled_at = now

    def take(self, now: float) -> bool:
        """Count one event; return whether it is within the rate."""
        self._tokens = min(self._per_s, self._tokens + (now - self._filled_at) * self._per_s)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


log = structlog.get_logger(__name__)

OWN_SHARE: Final = "own_share"
ALL: Final = "all"
Reason = Literal["own_share", "all"]
DISK_FULL: Final = 507
"""A status of the server's that its operator has to do something about."""
MAX_PACED: Final = 4096
"""Keys with counted refusals: as many as there may be connections."""


class BodyRoom:
    """Bytes of all bodies that are received, parsed or tokenised.

    Args:
      config: bounds.

    Attributes:
      held_bytes: of all bodies.
      refused: bodies for which there was no room, by what was full.
    """

    def __init__(self, config: DoorConfig) -> None:
        self._config = config
        self._held_by: Counter[str] = Counter()
        self.held_bytes = 0
        self.refused: Counter[Reason] = Counter({OWN_SHARE: 0, ALL: 0})

    def held_by(self, key: str) -> int:
        """Return the bytes of one key's bodies."""
        return self._held_by.get(key, 0)

    def hold(self, key: str) -> BodyHold:
        """Return what holds the room of one body of a key's."""
        return BodyHold(self, key, self._config.small_body_bytes)

    def take(self, key: str, num_bytes: int, *, is_small: bool) -> None:
        """Take room for bytes.

        Args:
          key: of the tenant or address that the body is of.
          num_bytes: more than before.
          is_small: the whole body has at most `small_body_bytes`.

        Raises:
          RequestError: 429 if the key has its share, 503 if all room is taken; nothing was taken.
        """
        if not is_small:
            self._check(key, num_bytes)
        self._held_by[key] += num_bytes
        self.held_bytes += num_bytes

    def give_back(self, key: str, num_bytes: int) -> None:
        """Give room back."""
        self.held_bytes -= num_bytes
        self._held_by[key] -= num_bytes
        if not self._held_by[key]:
            del self._held_by[key]

    def _check(self, key: str, num_bytes: int) -> None:
        config = self._config
        if self.held_by(key) + num_bytes > config.max_body_bytes_each:
            self.refused[OWN_SHARE] += 1
            raise too_many_waiting(
                f"your requests under way have bodies of {config.max_body_bytes_each // MIB} MiB, "
                "as many as may be read at once; wait for one of them to be answered",
                config.body_retry_s,
            )
        if self.held_bytes + num_bytes > config.max_body_bytes:
            self.refused[ALL] += 1
            raise overloaded(
                "this server reads as many bytes of bodies as it may", config.body_retry_s
            )


class BodyHold:
    """The room that one request's body takes.

    Args:
      room: where it is taken.
      key: of the tenant or address that the body is of.
      small_bytes: bodies up to here are never refused.

    Attributes:
      refusal: why the body is not taken any further; None while it is.
    """

    def __init__(self, room: BodyRoom, key: str, small_bytes: int) -> None:
        self._room = room
        self._key = key
        self._small_bytes = small_bytes
        self._held = 0
        self._is_over = False
        self.refusal: RequestError | None = None

    def grow_to(self, num_bytes: int) -> bool:
        """Take room for a body that has so many bytes so far, or is to have.

        Returns:
          Whether there is room; if not, `refusal` says why.
        """
        if self.refusal is None and not self._is_over and num_bytes > self._held:
            more, is_small = num_bytes - self._held, num_bytes <= self._small_bytes
            try:
                self._room.take(self._key, more, is_small=is_small)
            except RequestError as error:
                self.refusal = error
            else:
                self._held = num_bytes
        return self.refusal is None

    def give_back(self) -> None:
        """Give the room back: the body is not held any more. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._room.give_back(self._key, self._held)


class RefusalPace:
    """When refusals of each key may be answered: so many a second, each after the one before.

    Args:
      config: rate and longest wait.
    """

    def __init__(self, config: DoorConfig) -> None:
        self._interval_s = 1 / config.refusals_per_s
        self._max_wait_s = config.max_refusal_wait_s
        self._next_at: dict[str, float] = {}

    def wait_s(self, key: str, now: float) -> float:
        """Count a refusal, and return how long its answer waits: those of a second come at once."""
        if len(self._next_at) >= MAX_PACED and key not in self._next_at:
            self._next_at = {k: at for k, at in self._next_at.items() if at > now}
            if len(self._next_at) >= MAX_PACED:
                return self._max_wait_s
        next_at = max(self._next_at.get(key, 0.0), now)
        latest_at = now + 1.0 + self._max_wait_s
        self._next_at[key] = min(next_at + self._interval_s, latest_at)
        return min(max(0.0, next_at - now - 1.0), self._max_wait_s)


class RefusalLog:
    """Logs requests that end in an error of their client's, at most so many a second.

    The message of an error is not logged: it may repeat what the client sent.

    Args:
      config: the rate.
    """

    def __init__(self, config: DoorConfig) -> None:
        self._bucket = TokenBucket(config.refusals_logged_per_s, now=0.0)
        self._num_left_out = 0

    def tell(self, error: RequestError, now: float, **where: str | None) -> None:
        """Log a refusal, unless there were too many; the next line then says how many.

        Args:
          error: what the client is told.
          now: in seconds, on any clock.
          where: fields of the line that say which request it was.
        """
        if not (400 <= error.status < 500 or error.status == DISK_FULL):
            return
        if not self._bucket.take(now):
            self._num_left_out += 1
            return
        known = {name: value for name, value in where.items() if value}
        if error.param is not None:
            known["param"] = error.param
        log.info(
            "request_refused",
            status=error.status,
            code=error.code,
            left_out=self._num_left_out,
            **known,
        )
        self._num_left_out = 0

"""Limits before a request is read: rates, total size of bodies, and delay and logging of
refusals."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

import structlog

from triolet.errors import RequestError, overloaded, too_many_waiting
from triolet.units import MIB

if TYPE_CHECKING:
    from triolet.config import DoorConfig


class TokenBucket:
    """A token bucket that allows `per_s` events per second, and as many in a burst."""

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
"""A 5xx status that the operator must act on."""
MAX_PACED: Final = 4096
"""Maximum number of keys with counted refusals: the maximum number of connections."""


class BodyRoom:
    """Limits the total bytes of bodies that are being received, parsed or tokenized.

    Args:
      config: limits.

    Attributes:
      held_bytes: total bytes of all bodies.
      refused: number of refused bodies, by the limit that was reached.
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
        """Return a hold for one body of a key, without any bytes yet."""
        return BodyHold(self, key, self._config.small_body_bytes)

    def take(self, key: str, num_bytes: int, *, is_small: bool) -> None:
        """Reserve bytes.

        Args:
          key: the tenant or address that sends the body.
          num_bytes: additional bytes.
          is_small: whether the whole body has at most `small_body_bytes`.

        Raises:
          RequestError: 429 if the key has used its share, 503 if all room is in use; nothing was
            reserved.
        """
        if not is_small:
            self._check(key, num_bytes)
        self._held_by[key] += num_bytes
        self.held_bytes += num_bytes

    def give_back(self, key: str, num_bytes: int) -> None:
        """Release bytes."""
        self.held_bytes -= num_bytes
        self._held_by[key] -= num_bytes
        if not self._held_by[key]:
            del self._held_by[key]

    def _check(self, key: str, num_bytes: int) -> None:
        config = self._config
        if self.held_by(key) + num_bytes > config.max_body_bytes_each:
            self.refused[OWN_SHARE] += 1
            raise too_many_waiting(
                f"the bodies of your running requests use {config.max_body_bytes_each // MIB} MiB, "
                "the limit; wait for one of these requests to end",
                config.body_retry_s,
            )
        if self.held_bytes + num_bytes > config.max_body_bytes:
            self.refused[ALL] += 1
            raise overloaded(
                "this server is reading as many body bytes as it can hold", config.body_retry_s
            )


class BodyHold:
    """The bytes reserved for one request's body.

    Args:
      room: the limit that it counts against.
      key: the tenant or address that sends the body.
      small_bytes: bodies up to this size are never refused.

    Attributes:
      refusal: why the rest of the body is refused; None if it is not.
    """

    def __init__(self, room: BodyRoom, key: str, small_bytes: int) -> None:
        self._room = room
        self._key = key
        self._small_bytes = small_bytes
        self._held = 0
        self._is_over = False
        self.refusal: RequestError | None = None

    def grow_to(self, num_bytes: int) -> bool:
        """Reserve bytes until the hold has `num_bytes`, the size received or announced.

        Returns:
          Whether there is room; if not, `refusal` has the error.
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
        """Release the bytes. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._room.give_back(self._key, self._held)


class RefusalPace:
    """Delays refusals, so that each key gets at most a number of them per second.

    Args:
      config: rate and maximum delay.
    """

    def __init__(self, config: DoorConfig) -> None:
        self._interval_s = 1 / config.refusals_per_s
        self._max_wait_s = config.max_refusal_wait_s
        self._next_at: dict[str, float] = {}

    def wait_s(self, key: str, now: float) -> float:
        """Count a refusal and return its delay. A burst of one second's rate is not delayed."""
        if len(self._next_at) >= MAX_PACED and key not in self._next_at:
            self._next_at = {k: at for k, at in self._next_at.items() if at > now}
            if len(self._next_at) >= MAX_PACED:
                return self._max_wait_s
        next_at = max(self._next_at.get(key, 0.0), now)
        latest_at = now + 1.0 + self._max_wait_s
        self._next_at[key] = min(next_at + self._interval_s, latest_at)
        return min(max(0.0, next_at - now - 1.0), self._max_wait_s)


class RefusalLog:
    """Logs requests refused for an error of the client, up to a rate.

    Error messages are not logged because they may repeat what the client sent.

    Args:
      config: the rate.
    """

    def __init__(self, config: DoorConfig) -> None:
        self._bucket = TokenBucket(config.refusals_logged_per_s, now=0.0)
        self._num_left_out = 0

    def tell(self, error: RequestError, now: float, **where: str | None) -> None:
        """Log a refusal unless above the rate; the next line then counts the omitted ones.

        Args:
          error: the error sent to the client.
          now: seconds on any clock.
          where: fields that identify the request.
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

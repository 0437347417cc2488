"""`AnswerDirectory`: a directory in Redis that records which server holds the answer of an
idempotency key, shared by servers on several hosts.

Keys in Redis start with PREFIX, which contains one hash tag in braces:

- `answer:DIGEST`: the owner's id, random per process, so that a restarted server does not take its
  predecessor's answers for its own, even while both run;
- `server:ID`, a lease of that process: its host's URL, or ENDED;
- `beat`: exists while any server renews its lease; `settling`: exists for a short time after Redis
  was away, when leases of live servers have expired.

Each script is one round trip and one transaction. Values in any other form count as absent.
"""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import structlog
import trio

from transport.redis_calls import StoreGone, with_calls
from triolet.config import resolved_url

from .answer_place import AnswerOwner, AnswerPlace

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.redis_calls import RedisCalls
    from triolet.config import ServerConfig

    from ..contract.generation import CancelReason

log = structlog.get_logger(__name__)

PREFIX: Final = "{triolet}:hosts:"
MAX_RELEASED: Final = 1000
"""Most entries to remove in one call, which takes Redis a millisecond. The rest expire."""

_HEAD: Final = """
local P, id, ENDED = ARGV[1], ARGV[2], '-'
local lease = P .. 'server:' .. id

local function word(key)
  local value = redis.pcall('GET', key)
  if type(value) ~= 'string' then return nil end
  return string.match(value, '^%S+$')
end
"""
CLAIM: Final = (
    _HEAD
    + """
local entry, ttl_s, is_resuming = P .. 'answer:' .. ARGV[3], ARGV[4], ARGV[5] == '1'
if not word(lease) then return {'alone', ''} end
local owner = word(entry)
if owner and owner ~= id then
  local url = word(P .. 'server:' .. owner)
  if url and url ~= ENDED then return {'elsewhere', url} end
  if not url and redis.call('EXISTS', P .. 'settling') == 1 then return {'unknown', ''} end
  if is_resuming then return {'lost', ''} end
elseif not owner and is_resuming then
  return {'alone', ''}
end
redis.call('SET', entry, id, 'EX', ttl_s)
return {'here', ''}
"""
)
"""Return where the answer of a key is. If no live server has it, claim it for this server, unless
the request resumes an answer. Arguments: the key's digest, lifetime of the entry [s], whether the
request resumes."""
RENEW: Final = (
    _HEAD
    + """
local url, lease_ms = ARGV[3], ARGV[4]
local beat, settling = P .. 'beat', P .. 'settling'
if redis.call('EXISTS', beat) == 0 then redis.call('SET', settling, '', 'PX', lease_ms) end
redis.call('SET', beat, '', 'PX', lease_ms)
redis.call('SET', lease, url, 'PX', lease_ms)
"""
)
"""Renew this server's lease. Arguments: this host's URL, duration of the lease [ms]."""
RELEASE: Final = (
    _HEAD
    + """
for i = 3, #ARGV do
  local entry = P .. 'answer:' .. ARGV[i]
  if word(entry) == id then redis.call('DEL', entry) end
end
"""
)
"""Remove this server's entries for these keys. Arguments: the keys' digests."""
LEAVE: Final = _HEAD + "redis.call('SET', lease, ENDED, 'PX', ARGV[3])"
"""Record that this process has ended: an expired lease would not prove it. Argument: duration of
the lease [ms]."""


class AnswerClaim:
    """One request's claim on an idempotency key, held until the request ends. After the last claim
    of a key has ended, the key is freed as soon as no retry could join its answer.

    Args:
      directory: the directory.
      digest: digest of the key and its client.
      is_kept: returns whether a retry would join an answer of this server.

    Attributes:
      has_begun: always False: nothing is computed for a claim.
      owner: the holder of the answer.
    """

    has_begun = False

    def __init__(
        self, directory: AnswerDirectory, digest: str, is_kept: Callable[[], bool]
    ) -> None:
        self.owner = AnswerOwner(AnswerPlace.ALONE)
        self._directory = directory
        self._digest = digest
        self._is_kept = is_kept

    async def ask(self, *, is_resuming: bool) -> None:
        """Ask Redis for the owner; without one, this server becomes the owner. Has a deadline, and
        never raises.

        Args:
          is_resuming: whether the request can only continue an answer.
        """
        self.owner = await self._directory.owner_of(self._digest, is_resuming=is_resuming)

    def cancel(self, reason: CancelReason) -> None:
        """End the claim."""
        del reason
        self._directory.leave(
            # Redis may have made this server the owner although its reply came too late.
            self._digest,
            lambda: self.owner.place is not AnswerPlace.ELSEWHERE and not self._is_kept(),
        )


class AnswerDirectory:
    """One server's view of the directory.

    Args:
      config: Redis, this host's URL, and times.

    Raises:
      ConfigError: the file with Redis's URL cannot be read.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config.hosts
        # No answer exists for longer than its deadline plus the time that it is kept.
        self._ttl_s = int(config.default_deadline_s + config.resume.ttl_s) + 1
        self._lease_ms = str(int(config.hosts.lease_s * 1000))
        quotas = config.tenants.quotas
        self._use_redis = partial(
            with_calls,
            url=resolved_url(quotas.limits, "--limits"),
            scripts=(CLAIM, RENEW, RELEASE, LEAVE),
            first=(PREFIX, secrets.token_hex(8)),
            connect_timeout_s=quotas.connect_timeout_s,
            call_timeout_s=config.hosts.timeout_s,
        )
        self._calls: RedisCalls | None = None
        self._trouble = ""
        self._requests: Counter[str] = Counter()  # by digest
        self._released: set[str] = set()
        self._max_kept = config.resume.max_kept
        self._kept: dict[str, Callable[[], bool]] = {}  # keys without requests
        self._has_released = trio.Event()

    def claim(self, digest: str, is_kept: Callable[[], bool]) -> AnswerClaim:
        """Count a request with a key until its claim is cancelled. See `AnswerClaim`."""
        self._requests[digest] += 1
        self._released.discard(digest)
        self._kept.pop(digest, None)
        return AnswerClaim(self, digest, is_kept)

    def leave(self, digest: str, is_free: Callable[[], bool]) -> None:
        """Count the end of a request. After the last one, free its key once `is_free` returns
        true."""
        self._requests[digest] -= 1
        if self._requests[digest]:
            return
        del self._requests[digest]
        if self._calls is None:
            return
        if not is_free():
            if len(self._kept) < self._max_kept:
                self._kept[digest] = is_free
        elif len(self._released) < MAX_RELEASED:
            self._released.add(digest)
            self._has_released.set()

    async def owner_of(self, digest: str, *, is_resuming: bool) -> AnswerOwner:
        """Return the owner of an answer, and claim it if there is none. See `AnswerClaim.ask`."""
        if self._calls is None:
            return AnswerOwner(AnswerPlace.ALONE)
        try:
            place, url = await self._calls.call(CLAIM, digest, str(self._ttl_s), int(is_resuming))
        except StoreGone as gone:
            self._note(str(gone))
            return AnswerOwner(AnswerPlace.ALONE)
        return AnswerOwner(AnswerPlace(place), url)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Renew this server's lease until cancelled, reconnecting if Redis was away. Reports
        `started` after the first attempt."""
        is_first = True

        async def use(calls: RedisCalls) -> None:
            await self._renew(calls)
            self._calls = calls
            tell_started()
            await self._keep(calls)

        def tell_started() -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                task_status.started()

        while True:
            try:
                await self._use_redis(use)
            except StoreGone as gone:
                self._note(str(gone))
            self._calls = None
            tell_started()
            await trio.sleep(self._config.renew_s)

    async def _keep(self, calls: RedisCalls) -> None:
        """Renew the lease and free keys until Redis fails; end the lease when cancelled."""
        look_at = trio.current_time() + self._config.renew_s
        try:
            while True:
                with trio.move_on_at(look_at):
                    await self._has_released.wait()
                self._has_released = trio.Event()
                if trio.current_time() >= look_at:
                    look_at = trio.current_time() + self._config.renew_s
                    self._release_kept()
                if digests := tuple(self._released):
                    self._released.clear()
                    await calls.call(RELEASE, *digests)
                await self._renew(calls)
        except trio.Cancelled:
            with trio.CancelScope(shield=True), suppress(StoreGone):
                await calls.call(LEAVE, self._lease_ms)
            raise

    def _release_kept(self) -> None:
        """Free keys whose answers are no longer kept."""
        free = (digest for digest, is_free in self._kept.items() if is_free())
        for digest in tuple(islice(free, MAX_RELEASED)):
            del self._kept[digest]
            self._released.add(digest)

    async def _renew(self, calls: RedisCalls) -> None:
        await calls.call(RENEW, self._config.advertised_url, self._lease_ms)
        self._note("")

    def _note(self, trouble: str) -> None:
        """Log once when keys stop being shared, and once when they are shared again."""
        if trouble and not self._trouble:
            log.warning("keys_are_local", reason=trouble)
        elif self._trouble and not trouble:
            log.warning("keys_are_shared")
        self._trouble = trouble

"""Which server holds the answer of an idempotency key, for servers on several hosts: a directory in
Redis.

All keys start with PREFIX, which contains one hash tag in braces:

- `answer:DIGEST`: the id of its owner. An id is random per process: a server never takes its
  predecessor's answers for its own, and both may run at the same time;
- `server:ID`, a lease: the URL of the process's host, or ENDED;
- `beat`: exists while any server renews its lease; `settling`: exists for a while after Redis was
  away, when leases have expired although their servers live.

Each script is one round trip and one transaction. A value that is not of this form counts as
absent.
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
"""Entries that are removed together, which takes Redis a millisecond. Beyond this they expire."""

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
"""Return where the answer of a key is; if no live server has it, it is here from now on, unless the
request resumes an earlier one. Arguments: the key's digest, how long the entry is kept [s], whether
the request resumes."""
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
"""Renew this server's lease. Arguments: this host's URL, length of the lease [ms]."""
RELEASE: Final = (
    _HEAD
    + """
for i = 3, #ARGV do
  local entry = P .. 'answer:' .. ARGV[i]
  if word(entry) == id then redis.call('DEL', entry) end
end
"""
)
"""Remove the entries of keys that are this server's. Arguments: the keys' digests."""
LEAVE: Final = _HEAD + "redis.call('SET', lease, ENDED, 'PX', ARGV[3])"
"""Record that this process has ended, which a lease that has expired does not say. Argument: length
of the lease [ms]."""


class AnswerClaim:
    """A request's interest in the answer of a key. The request holds it until it ends; when the
    last one of a key has ended, the key is free as soon as no retry joins its answer.

    Args:
      directory: the directory.
      digest: digest of the key and its client.
      is_kept: whether a retry of the key joins an answer of this server.

    Attributes:
      has_begun: False; nothing is computed for it.
      owner: who holds the answer.
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
        """Ask Redis for the owner, and become it if there is none. Bounded in time, never fails.

        Args:
          is_resuming: whether the request can only continue an answer.
        """
        self.owner = await self._directory.owner_of(self._digest, is_resuming=is_resuming)

    def cancel(self, reason: CancelReason) -> None:
        """End it."""
        del reason
        self._directory.leave(
            # An answer from Redis that came too late may have made the key ours.
            self._digest,
            lambda: self.owner.place is not AnswerPlace.ELSEWHERE and not self._is_kept(),
        )


class AnswerDirectory:
    """The directory, as one server uses it.

    Args:
      config: Redis, this host's URL, and times.

    Raises:
      ConfigError: the file of Redis's URL cannot be read.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config.hosts
        # No answer is kept for longer than it may run and be kept.
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
        self._kept: dict[str, Callable[[], bool]] = {}  # keys without requests: is it free?
        self._has_released = trio.Event()

    def claim(self, digest: str, is_kept: Callable[[], bool]) -> AnswerClaim:
        """Count a request with a key, until its claim is cancelled. See `AnswerClaim`."""
        self._requests[digest] += 1
        self._released.discard(digest)
        self._kept.pop(digest, None)
        return AnswerClaim(self, digest, is_kept)

    def leave(self, digest: str, is_free: Callable[[], bool]) -> None:
        """Count the end of a request; after the last one, free its key as soon as `is_free`."""
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
        """Return who holds an answer, and claim it if there is no owner. See `AnswerClaim.ask`."""
        if self._calls is None:
            return AnswerOwner(AnswerPlace.ALONE)
        try:
            place, url = await self._calls.call(CLAIM, digest, str(self._ttl_s), int(is_resuming))
        except StoreGone as gone:
            self._note(str(gone))
            return AnswerOwner(AnswerPlace.ALONE)
        return AnswerOwner(AnswerPlace(place), url)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep this server's lease, and connect again while Redis is away, until cancelled. Started
        after one attempt."""
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
        """Log once that keys are not shared, and once that they are again."""
        if trouble and not self._trouble:
            log.warning("keys_are_local", reason=trouble)
        elif self._trouble and not trouble:
            log.warning("keys_are_shared")
        self._trouble = trouble

"""Which server holds the answer of an idempotency key, for servers on several hosts: a directory in
Redis.

All keys start with PREFIX, which contains one hash tag in braces:

- `answer:DIGEST`: owner and its lease, `ID LEASE`. An id is random per process, so that a restarted
  server never takes its predecessor's answers for its own;
- `server:HOST/SERVER`, a lease: `ID URL`, of the process that has this name now. A new process
  replaces its predecessor's lease, which is then dead at once;
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
local P, lease, id = ARGV[1], ARGV[1] .. 'server:' .. ARGV[2], ARGV[3]

local function pair(key)
  local value = redis.pcall('GET', key)
  if type(value) ~= 'string' then return nil end
  return string.match(value, '^(%S+) (%S+)$')
end
"""
CLAIM: Final = (
    _HEAD
    + """
local entry, ttl_s, is_resuming = P .. 'answer:' .. ARGV[4], ARGV[5], ARGV[6] == '1'
if pair(lease) ~= id then return {'alone', ''} end
local owner, owners_lease = pair(entry)
if owner and owner ~= id then
  local holder, url = pair(owners_lease)
  if holder == owner then return {'elsewhere', url} end
  if not holder and redis.call('EXISTS', P .. 'settling') == 1 then return {'unknown', ''} end
  if is_resuming then return {'lost', ''} end
elseif not owner and is_resuming then
  return {'alone', ''}
end
redis.call('SET', entry, id .. ' ' .. lease, 'EX', ttl_s)
return {'here', ''}
"""
)
"""Return where the answer of a key is; if no live server has it, it is here from now on, unless the
request resumes an earlier one. Arguments: the key's digest, how long the entry is kept [s], whether
the request resumes."""
RENEW: Final = (
    _HEAD
    + """
local url, lease_ms, is_new = ARGV[4], ARGV[5], ARGV[6] == '1'
local beat, settling = P .. 'beat', P .. 'settling'
if redis.call('EXISTS', beat) == 0 then redis.call('SET', settling, '', 'PX', lease_ms) end
redis.call('SET', beat, '', 'PX', lease_ms)
local holder, holders_url = pair(lease)
if holder and holder ~= '-' and holder ~= id and not is_new then return holders_url end
redis.call('SET', lease, id .. ' ' .. url, 'PX', lease_ms)
return ''
"""
)
"""Renew this server's lease; return the URL of the server that has taken the name, or an empty
text. Arguments: this host's URL, length of the lease [ms], whether this is the first time."""
RELEASE: Final = (
    _HEAD
    + """
for i = 4, #ARGV do
  local entry = P .. 'answer:' .. ARGV[i]
  if pair(entry) == id then redis.call('DEL', entry) end
end
"""
)
"""Remove the entries of keys that are this server's. Arguments: the keys' digests."""
LEAVE: Final = (
    _HEAD
    + """
if pair(lease) == id then redis.call('SET', lease, '- -', 'PX', ARGV[4]) end
"""
)
"""Give this server's name to no process, which a lease that has expired does not say. Argument:
length of the lease [ms]."""


class AnswerClaim:
    """A request's interest in the answer of a key. The request holds it until it ends; when the
    last one of a key has ended without an answer, the key is free again.

    Args:
      directory: the directory.
      digest: digest of the key and its client.
      is_kept: whether this server keeps an answer of the key.

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
      config: Redis, names, and times.
      server: name of this server on its host.

    Raises:
      ConfigError: the file of Redis's URL cannot be read.
    """

    def __init__(self, config: ServerConfig, server: str) -> None:
        self._config = config.hosts
        self._name = f"{config.hosts.name}/{server}"
        # No answer is kept for longer than it may run and be kept.
        self._ttl_s = int(config.default_deadline_s + config.resume.ttl_s) + 1
        self._lease_ms = str(int(config.hosts.lease_s * 1000))
        quotas = config.tenants.quotas
        self._use_redis = partial(
            with_calls,
            url=resolved_url(quotas.limits, "--limits"),
            scripts=(CLAIM, RENEW, RELEASE, LEAVE),
            first=(PREFIX, self._name, secrets.token_hex(8)),
            connect_timeout_s=quotas.connect_timeout_s,
            call_timeout_s=config.hosts.timeout_s,
        )
        self._calls: RedisCalls | None = None
        self._trouble = ""
        self._is_new = True
        self._requests: Counter[str] = Counter()  # by digest
        self._released: set[str] = set()
        self._has_released = trio.Event()

    def claim(self, digest: str, is_kept: Callable[[], bool]) -> AnswerClaim:
        """Count a request with a key, until its claim is cancelled. See `AnswerClaim`."""
        self._requests[digest] += 1
        self._released.discard(digest)
        return AnswerClaim(self, digest, is_kept)

    def leave(self, digest: str, is_free: Callable[[], bool]) -> None:
        """Count the end of a request; free its key if it was the last one and left no answer."""
        self._requests[digest] -= 1
        if self._requests[digest]:
            return
        del self._requests[digest]
        if self._calls is not None and len(self._released) < MAX_RELEASED and is_free():
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
        try:
            while True:
                with trio.move_on_after(self._config.renew_s):
                    await self._has_released.wait()
                self._has_released = trio.Event()
                if digests := tuple(self._released):
                    self._released.clear()
                    await calls.call(RELEASE, *digests)
                await self._renew(calls)
        except trio.Cancelled:
            with trio.CancelScope(shield=True), suppress(StoreGone):
                await calls.call(LEAVE, self._lease_ms)
            raise

    async def _renew(self, calls: RedisCalls) -> None:
        arguments = (self._config.advertised_url, self._lease_ms, int(self._is_new))
        other = await calls.call(RENEW, *arguments)
        self._is_new = False
        is_twice = other not in ("", self._config.advertised_url)
        self._note(f"{other} has the same server.hosts.name" if is_twice else "")

    def _note(self, trouble: str) -> None:
        """Log once that keys are not shared, and once that they are again."""
        if trouble and not self._trouble:
            log.warning("keys_are_local", server=self._name, reason=trouble)
        elif self._trouble and not trouble:
            log.warning("keys_are_shared", server=self._name)
        self._trouble = trouble

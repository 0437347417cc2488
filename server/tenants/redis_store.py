"""Accounts of several servers, kept in Redis; while Redis is away, this server's part of them."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
import trio

from triolet.config import shown_url
from triolet.units import SECONDS

from .accounts import GRAIN, Account, Ask, Bucket, Entry, Limit, Verdict, month_of
from .local_share import Journal, LocalShare
from .memory_store import time_of_day
from .redis_calls import APPLY, BEAT, LEAVE, RESERVE, StoreGone, with_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.config import QuotaConfig

    from .accounts import Limits, Settlement
    from .quotas import SpendWatch
    from .redis_calls import RedisCalls


log = structlog.get_logger(__name__)

LAST_WORDS_S: Final = 3 * SECONDS
"""For the last batches when this process ends."""


NO_ID: Final = ""
"""Id of an Ask that only reads."""


class RedisStore:
    """All accounts of several servers.

    Args:
      config: where Redis is, and bounds.
      observer: told of spend, and of calls that failed.
      server: this process; no other one ever has the same name.

    Attributes:
      num_servers: that share the limits, this one included, when Redis last said.
    """

    def __init__(self, config: QuotaConfig, observer: SpendWatch, server: str) -> None:
        self._config = config
        self._observer = observer
        self._server = server
        self._calls: RedisCalls | None = None
        self._failures = 0
        self._failed_at = -math.inf
        self.num_servers = config.servers
        self._reserved: set[str] = set()  # ids of asks
        self._local = LocalShare()
        self._journal = Journal(config.max_batch)
        self._seen: dict[str, Entry] = {}  # as Redis last told them
        self._has_changes = trio.Event()
        self._broken = trio.Event()

    @property
    def is_well(self) -> bool:
        """Whether Redis is asked."""
        return self._calls is not None

    @property
    def num_reserved(self) -> int:
        """Requests of this server that are not settled."""
        return len(self._reserved) + len(self._local.held)

    async def reserve(self, ask: Ask, limits: Limits) -> Verdict:
        """Reserve the expected use of a request, or refuse it. Bounded in time, never fails."""
        verdict = None
        if self._calls is not None:
            try:
                verdict = await self._ask(self._calls, ask, limits)
            finally:
                if verdict is None:  # it may have been reserved all the same
                    self._journal.void(ask.id)
                    self._has_changes.set()
        if verdict is None:
            self._open_local(ask.tenant, limits)
            return self._local.reserve(ask, _month(), trio.current_time())
        if verdict.refused_by is None:
            self._reserved.add(ask.id)
        return verdict

    def settle(self, settlement: Settlement) -> None:
        """Replace a reservation by the use. Never waits or fails; called once per reservation."""
        is_ours = settlement.id in self._reserved
        self._reserved.discard(settlement.id)
        if is_ours or (self._calls is not None and settlement.id not in self._local.held):
            self._journal.settle(settlement)
            self._has_changes.set()
            return
        self._open_local(settlement.tenant, settlement.limits)
        self._local.settle(settlement, _month(), trio.current_time())

    def last_seen(self, tenant: str, limits: Limits, within_s: float = math.inf) -> Account | None:
        """Return an account as last seen here, refilled since; None if nothing is known, or only
        what is older than `within_s`."""
        if tenant in self._local.opened:
            return self._local.account(tenant, _month(), trio.current_time())
        return _by_now(self._seen.get(tenant), limits, within_s) if self.is_well else None

    def enforced(self, limits: Limits) -> Limits:
        """Return the limits, or this server's part of them while Redis is away."""
        return limits if self.is_well else limits.shared_by(self.num_servers)

    async def account(self, tenant: str, limits: Limits) -> Account:
        """Return an account as it is, or as last seen. Bounded in time, never fails."""
        if self._calls is not None:
            verdict = await self._ask(self._calls, Ask(NO_ID, tenant, 0), limits)
            if verdict is not None:
                return verdict.account
        now, count = trio.current_time(), 1 if self.is_well else self.num_servers
        if tenant in self._local.opened:
            return self._local.account(tenant, _month(), now)
        # Nothing is opened: a look at all tenants would open as many accounts.
        seen = _by_now(self._seen.get(tenant), limits)
        seen = seen or Account(limits.requests or 0.0, limits.tokens or 0.0, 0, 0, 0)
        return replace(seen, requests=seen.requests / count, tokens=seen.tokens / count)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect to Redis, again after each loss, until cancelled. Started after one try."""
        is_first = True

        async def use(calls: RedisCalls) -> None:
            await self._beat(calls, is_asking=True)
            self._settle_up()
            self._is_back(calls)
            if is_first:
                task_status.started()
            await self._keep(calls)

        while True:
            self._broken = trio.Event()
            try:
                await with_calls(self._config, self._server, use)
            except StoreGone as gone:
                self._observer.call_failed(str(gone))
                if is_first:
                    self._is_away(str(gone))
                    task_status.started()
            is_first = False
            await trio.sleep(self._config.probe_s)

    async def _ask(self, calls: RedisCalls, ask: Ask, limits: Limits) -> Verdict | None:
        """Return the answer of Redis, or None if there is none."""
        began_at = trio.current_time()
        try:
            reply = await calls.call(
                RESERVE,
                *(ask.id, ask.tenant, ask.tokens, ask.cost),
                *(-1 if limit is None else limit for limit in astuple(limits)),
                GRAIN,
            )
        except StoreGone as gone:
            self._failed(gone, began_at)
            return None
        self._failures = 0
        verdict = _verdict(reply)
        now, account = trio.current_time(), verdict.account
        self._seen[ask.tenant] = Entry(
            Bucket(account.requests, now),
            Bucket(account.tokens, now),
            account.in_flight,
            spent=account.spent,
            used_tokens=account.used_tokens,
        )
        return verdict

    async def _keep(self, calls: RedisCalls) -> None:
        """Send changes and heartbeats until Redis fails or the task is cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._tell, calls)
                nursery.start_soon(self._beat_on, calls)
                await self._broken.wait()
                nursery.cancel_scope.cancel()
        finally:
            if self._calls is not None:
                with trio.move_on_after(LAST_WORDS_S, shield=True), suppress(StoreGone):
                    if await self._send_all(calls) and not self._reserved:
                        await calls.call(LEAVE)

    async def _tell(self, calls: RedisCalls) -> None:
        while True:
            await self._has_changes.wait()
            self._has_changes = trio.Event()
            while not await self._send_all(calls):  # noqa: ASYNC110 (it asks Redis)
                await trio.sleep(self._config.probe_s)

    async def _send_all(self, calls: RedisCalls) -> bool:
        """Send all changes; return whether all were answered."""
        while (batch := self._journal.next_batch()) is not None:
            began_at = trio.current_time()
            try:
                reply = await calls.call(APPLY, batch.number, batch.changes)
            except StoreGone as gone:
                self._failed(gone, began_at)
                return False
            self._failures = 0
            self._journal.answered()
            spent = msgspec.json.decode(reply, type=dict[str, tuple[str, str]])
            for tenant, (before, after) in spent.items():
                self._observer.spent(tenant, int(before), int(after))
        return True

    async def _beat_on(self, calls: RedisCalls) -> None:
        while True:
            await trio.sleep(self._config.heartbeat_s)
            began_at = trio.current_time()
            try:
                await self._beat(calls)
            except StoreGone as gone:
                self._failed(gone, began_at)
            else:
                self._settle_up()

    async def _beat(self, calls: RedisCalls, *, is_asking: bool = False) -> None:
        """Renew the lease of this server, and release reservations of servers with ended leases.

        Raises:
          StoreGone: Redis may or may not have done it.
        """
        config = self._config
        reply = await calls.call(BEAT, config.lease_s, config.max_batch, int(is_asking))
        self.num_servers, refunded, held = int(reply[0]), int(reply[1]), reply[2]
        if refunded:
            log.warning("reservations_of_lost_server_given_back", count=refunded)
        for ask_id in set(held) - self._reserved:
            # Of a call that was given up; or it is settled, which Redis learns before this.
            self._journal.void(ask_id)

    def _settle_up(self) -> None:
        """Journal the spend and the reservations of the local accounts, and close these."""
        self._local.report(self._journal, _month(), trio.current_time())
        self._reserved |= self._local.held.keys()
        self._local.clear()
        if self._journal:
            self._has_changes.set()

    def _failed(self, gone: StoreGone, began_at: float) -> None:
        self._observer.call_failed(str(gone))
        if began_at < self._failed_at:
            return  # one standstill of Redis' fails many calls at once, and is one failure
        self._failed_at = trio.current_time()
        self._failures += 1
        if self._failures >= self._config.max_failures and self._calls is not None:
            self._is_away(str(gone))

    def _is_away(self, reason: str) -> None:
        self._calls = None
        self._broken.set()
        log.warning(
            "limits_are_local",
            store=shown_url(self._config.limits),
            reason=reason,
            part=f"1/{self.num_servers}",
        )

    def _is_back(self, calls: RedisCalls) -> None:
        self._calls = calls
        self._failures = 0
        log.info(
            "limits_are_shared", store=shown_url(self._config.limits), servers=self.num_servers
        )

    def _open_local(self, tenant: str, limits: Limits) -> None:
        seen = _by_now(self._seen.get(tenant), limits)
        self._local.open(tenant, limits, self.num_servers, seen, _month())


def _by_now(entry: Entry | None, limits: Limits, within_s: float = math.inf) -> Account | None:
    """Return an account as it would be untouched since Redis told it; None if it never did, or
    longer ago than `within_s`."""
    now = trio.current_time()
    if entry is None or now - entry.requests.at > within_s:
        return None
    return entry.account(limits, now)


def _month() -> str:
    return month_of(time_of_day())


def _verdict(reply: Sequence[str]) -> Verdict:
    refused, wait_s, requests, tokens, in_flight, spent, used = reply
    account = Account(
        float(requests), float(tokens), int(float(in_flight)), int(float(spent)), int(float(used))
    )
    return Verdict(account, Limit(refused) if refused else None, float(wait_s))

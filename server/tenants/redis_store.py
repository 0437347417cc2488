"""Tenant accounts shared by several servers through Redis. While Redis cannot be reached, each
server enforces its own part of the limits.

Local accounts start with this server's full part of a minute and are dropped when Redis is back:
its state then applies, and local charges are not reported. Requests reserved in Redis are settled
there, even if they end during the outage.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import suppress
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import structlog
import trio

from transport.redis_calls import StoreGone, with_calls
from triolet.config import shown_url
from triolet.units import SECONDS

from .accounts import (
    GRAIN,
    Account,
    AccountEntry,
    Bucket,
    Ledger,
    Limit,
    QuotaAsk,
    QuotaVerdict,
    Settlement,
    TenantLimits,
    month_of,
)
from .memory_store import time_of_day
from .redis_scripts import BEAT, LEAVE, PREFIX, RESERVE, SCRIPTS, SETTLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transport.redis_calls import RedisCalls
    from triolet.config import QuotaConfig

    from .memory_store import SpendWatch


log = structlog.get_logger(__name__)

MAX_FAILURES: Final = 3
"""Consecutive failed calls after which Redis is no longer asked; until then this server decides
each failed one."""
MAX_BATCH: Final = 128
"""Settlements sent together: they occupy Redis for about a millisecond."""
LAST_WORDS_S: Final = 3 * SECONDS
"""Deadline for the last batches when this process ends."""


NO_ID: Final = ""
"""Id of a `QuotaAsk` that only reads."""


class Batch(NamedTuple):
    """Settlements sent together."""

    number: int
    settlements: str


class Unsent:
    """Settlements that Redis has not acknowledged. Bounded, because while Redis is away only
    requests reserved there are added.

    Attributes:
      num_added: settlements ever added.
      num_sent: settlements that Redis has acknowledged.
    """

    def __init__(self) -> None:
        self._settlements: deque[Settlement] = deque()
        self._batch: Batch | None = None
        self._number = 0
        self.num_added = self.num_sent = 0

    def add(self, settlement: Settlement) -> None:
        """Add a settlement at the end."""
        self._settlements.append(settlement)
        self.num_added += 1

    def give_back(self, ask_id: str, tenant: str) -> None:
        """Add the release of a reservation that Redis may hold."""
        self.add(Settlement(ask_id, tenant, TenantLimits(), 0, 0, is_begun=False))

    def next_batch(self) -> Batch | None:
        """Return the unacknowledged batch, or else the next one; None if there is none."""
        if self._batch is None and self._settlements:
            count = min(MAX_BATCH, len(self._settlements))
            batch = [_document(self._settlements.popleft()) for _ in range(count)]
            self._number += 1
            self._batch = Batch(self._number, msgspec.json.encode(batch).decode())
        return self._batch

    def answered(self) -> None:
        """Drop the acknowledged batch."""
        self._batch = None
        self.num_sent = self.num_added - len(self._settlements)


def _document(settlement: Settlement) -> dict[str, str | float]:
    requests, tokens = settlement.limits.requests, settlement.limits.tokens
    return {
        "id": settlement.id,
        "tenant": settlement.tenant,
        "requests": int(settlement.is_begun),
        "tokens": settlement.tokens,
        "cost": settlement.cost,
        "once_id": settlement.once_id,
        "request_limit": -1 if requests is None else requests,
        "token_limit": -1 if tokens is None else tokens,
    }


class RedisStore:
    """The accounts shared by several servers.

    Args:
      config: Redis's address, and bounds.
      observer: receives spending and failed calls.
      server: this process's unique name.

    Attributes:
      num_servers: servers that share the limits, including this one, as last reported by Redis.
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
        self._local = Ledger()
        self._unsent = Unsent()
        self._seen: dict[str, AccountEntry] = {}  # as last reported by Redis
        self._has_changes = trio.Event()
        self._was_sent = trio.Event()
        self._broken = trio.Event()

    @property
    def is_well(self) -> bool:
        """Whether Redis is in use."""
        return self._calls is not None

    @property
    def num_reserved(self) -> int:
        """Number of this server's requests that are not settled."""
        return len(self._reserved) + len(self._local.held)

    async def reserve(self, ask: QuotaAsk, limits: TenantLimits) -> QuotaVerdict:
        """Reserve the expected use of a request, or refuse it. Bounded in time, never fails."""
        verdict = None
        if self._calls is not None:
            try:
                verdict = await self._ask(self._calls, ask, limits)
            finally:
                if verdict is None:  # Redis may have reserved it anyway
                    self._unsent.give_back(ask.id, ask.tenant)
                    self._has_changes.set()
        if verdict is None:
            part = self._local_part(ask.tenant, limits)
            return self._local.reserve(ask, part, _month(), trio.current_time())
        if verdict.refused_by is None:
            self._reserved.add(ask.id)
        return verdict

    def settle(self, settlement: Settlement) -> None:
        """Replace a reservation by the use. Never blocks or fails; call once per reservation."""
        if self.is_well or settlement.id in self._reserved:
            self._reserved.discard(settlement.id)
            self._unsent.add(settlement)
            self._has_changes.set()
            return
        part = self._local_part(settlement.tenant, settlement.limits)
        self._local.settle(settlement, part, _month(), trio.current_time())

    async def wait_saved(self) -> None:
        """Wait until Redis has all settlements so far, so that they are charged even if this
        process dies. Stop waiting when Redis counts as away."""
        wanted = self._unsent.num_added
        with trio.move_on_after(MAX_FAILURES * self._config.call_timeout_s):
            while self.is_well and self._unsent.num_sent < wanted:
                await self._was_sent.wait()

    def last_seen(
        self, tenant: str, limits: TenantLimits, within_s: float = math.inf
    ) -> Account | None:
        """Return the last known account, refilled since; None if unknown or older than
        `within_s`."""
        if not self.is_well:
            return self._local_account(tenant, limits)
        return _by_now(self._seen.get(tenant), limits, within_s)

    def enforced(self, limits: TenantLimits) -> TenantLimits:
        """Return the limits, or this server's part of them while Redis is away."""
        return limits if self.is_well else limits.shared_by(self.num_servers)

    async def account(self, tenant: str, limits: TenantLimits) -> Account:
        """Return the current account, or the last known one. Bounded in time, never fails."""
        if self._calls is not None:
            verdict = await self._ask(self._calls, QuotaAsk(NO_ID, tenant, 0), limits)
            if verdict is not None:
                return verdict.account
        seen = self.last_seen(tenant, limits)
        return seen or AccountEntry().account(limits, trio.current_time())

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Connect to Redis, and reconnect after each loss, until cancelled. Started after one
        attempt."""
        is_first = True

        async def use(calls: RedisCalls) -> None:
            await self._beat(calls, is_asking=True)
            self._calls, self._failures = calls, 0
            log.info(
                "limits_are_shared", store=shown_url(self._config.limits), servers=self.num_servers
            )
            if is_first:
                task_status.started()
            await self._keep(calls)

        while True:
            self._broken = trio.Event()
            try:
                await with_calls(
                    use,
                    url=self._config.limits,
                    scripts=SCRIPTS,
                    first=(PREFIX, self._server),
                    connect_timeout_s=self._config.connect_timeout_s,
                    call_timeout_s=self._config.call_timeout_s,
                )
            except StoreGone as gone:
                self._observer.call_failed(str(gone))
                if is_first:
                    self._is_away(str(gone))
                    task_status.started()
            is_first = False
            await trio.sleep(self._config.probe_s)

    async def _ask(
        self, calls: RedisCalls, ask: QuotaAsk, limits: TenantLimits
    ) -> QuotaVerdict | None:
        """Return Redis's answer, or None if there is none."""
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
        self._seen[ask.tenant] = AccountEntry(
            Bucket(account.requests, now),
            Bucket(account.tokens, now),
            account.in_flight,
            spent=account.spent,
            used_tokens=account.used_tokens,
        )
        return verdict

    async def _keep(self, calls: RedisCalls) -> None:
        """Send settlements and heartbeats until Redis fails or the task is cancelled."""
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
            while not await self._send_all(calls):  # noqa: ASYNC110 (it asks Redis)
                await trio.sleep(self._config.probe_s)
            await self._has_changes.wait()
            self._has_changes = trio.Event()

    async def _send_all(self, calls: RedisCalls) -> bool:
        """Send all settlements; return whether all were acknowledged."""
        while (batch := self._unsent.next_batch()) is not None:
            began_at = trio.current_time()
            try:
                reply = await calls.call(
                    SETTLE, batch.number, batch.settlements, int(self._config.charged_once_s)
                )
            except StoreGone as gone:
                self._failed(gone, began_at)
                return False
            self._failures = 0
            self._unsent.answered()
            self._was_sent.set()
            self._was_sent = trio.Event()
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

    async def _beat(self, calls: RedisCalls, *, is_asking: bool = False) -> None:
        """Renew this server's lease, release reservations of servers with expired leases, and drop
        the local accounts.

        Args:
          calls: the connection to Redis.
          is_asking: also release reservations that Redis holds for this server but this server does
            not know.

        Raises:
          StoreGone: Redis may or may not have done it.
        """
        reply = await calls.call(BEAT, self._config.lease_s, MAX_BATCH, int(is_asking))
        self.num_servers, refunded, held = int(reply[0]), int(reply[1]), reply[2]
        if refunded:
            log.warning("reservations_of_lost_server_given_back", count=refunded)
        for ask_id, record in zip(held[::2], held[1::2], strict=True):
            if ask_id not in self._reserved:
                # From an abandoned call; or already settled, which Redis receives before this.
                self._unsent.give_back(ask_id, msgspec.json.decode(record)["tenant"])
        self._local = Ledger()

    def _failed(self, gone: StoreGone, began_at: float) -> None:
        self._observer.call_failed(str(gone))
        if began_at < self._failed_at:
            return  # one outage fails many calls at once and counts as one failure
        self._failed_at = trio.current_time()
        self._failures += 1
        if self._failures >= MAX_FAILURES and self._calls is not None:
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

    def _local_part(self, tenant: str, limits: TenantLimits) -> TenantLimits:
        """Return this server's part of the limits. Of the budget it is a part of what was left when
        Redis was last asked, because no server sees the others' spending."""
        part = limits.shared_by(self.num_servers)
        if part.budget is None:
            return part
        left = max(0, part.budget - self._seen.get(tenant, AccountEntry()).spent)
        return replace(part, budget=left // self.num_servers)

    def _local_account(self, tenant: str, limits: TenantLimits) -> Account:
        """Return this server's part of an account, plus the last known total spending."""
        part, seen = self._local_part(tenant, limits), self._seen.get(tenant, AccountEntry())
        local = self._local.entry(tenant, _month()).account(part, trio.current_time())
        return replace(
            local, spent=seen.spent + local.spent, used_tokens=seen.used_tokens + local.used_tokens
        )


def _by_now(
    entry: AccountEntry | None, limits: TenantLimits, within_s: float = math.inf
) -> Account | None:
    """Return an account as it would be if unchanged since Redis reported it; None if unknown or
    older than `within_s`."""
    now = trio.current_time()
    if entry is None or now - entry.requests.at > within_s:
        return None
    return entry.account(limits, now)


def _month() -> str:
    return month_of(time_of_day())


def _verdict(reply: Sequence[str]) -> QuotaVerdict:
    refused, wait_s, requests, tokens, in_flight, spent, used = reply
    account = Account(
        float(requests), float(tokens), int(float(in_flight)), int(float(spent)), int(float(used))
    )
    return QuotaVerdict(account, Limit(refused) if refused else None, float(wait_s))

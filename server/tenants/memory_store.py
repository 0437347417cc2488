"""Accounts in memory, the file of spend, which outlives the process, and what all stores report.

The file is blocking: called from one thread at a time. Several servers of one host may share it:
each adds its own spend and reads the sum of all.
"""

from __future__ import annotations

import math
import sqlite3
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import structlog
import trio

from triolet.errors import ConfigError
from triolet.private_files import make_private_database, make_private_folder
from triolet.sqlite import transaction
from triolet.units import NANOS, SECONDS

from ..text.threads import in_thread
from .accounts import Ledger, month_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from triolet.config import QuotaConfig
    from triolet.tenants.plans import Plan

    from .accounts import Account, QuotaAsk, QuotaVerdict, Settlement, TenantLimits


log = structlog.get_logger(__name__)


class QuotaObserver:
    """Told of limits and spend; here nothing is counted."""

    def refused(self, limit: str) -> None:
        """A request met a limit."""

    def reserved(self, elapsed_s: float) -> None:
        """The store was asked, and took so long."""

    def unreserved(self, tenant: str) -> None:
        """A request was counted for which nothing was reserved."""

    def cost(self, tenant: str, amount: float) -> None:
        """A tenant was charged so much, in the operator's currency."""

    def auto_cost(self, model: str, amount: float, on_largest: float) -> None:
        """A request for `auto` was charged; and its cost on the largest one."""

    def budget_watched(self, tenant: str, share: float) -> None:
        """From now on it is noted when a tenant's spend crosses a share of its budget."""

    def budget_alert(self, tenant: str, share: float) -> None:
        """A tenant's spend crossed a share of its budget."""

    def store_failed(self) -> None:
        """The shared store did not do what it was asked."""


class SpendWatch:
    """Observer of a store: budget alerts, and failed calls.

    Args:
      metrics: counts them.
    """

    def __init__(self, metrics: QuotaObserver) -> None:
        self._metrics = metrics
        self._plans: dict[str, Plan] = {}

    def note(self, tenant: str, plan: Plan) -> None:
        """Set the plan of a tenant."""
        if self._plans.get(tenant) == plan:
            return
        self._plans[tenant] = plan
        if plan.budget is not None:
            for share in plan.budget_alerts:
                self._metrics.budget_watched(tenant, share)

    def spent(self, tenant: str, before: int, after: int) -> None:
        """Log if a share of the budget lies between a tenant's spend before and after [nanos].

        Each change is reported to one server, and spend only grows: each alert is logged once.
        """
        plan = self._plans.get(tenant)
        if plan is None or plan.budget is None:
            return
        for share in plan.budget_alerts:
            if before < share * plan.budget * NANOS <= after:
                log.warning(
                    "budget_alert",
                    tenant=tenant,
                    share=share,
                    spent=round(after / NANOS, 6),
                    budget=plan.budget,
                )
                self._metrics.budget_alert(tenant, share)

    def call_failed(self, reason: str) -> None:
        """Count that the shared store did not do what it was asked; the store logs what follows."""
        del reason
        self._metrics.store_failed()


BUSY_S: Final = 5 * SECONDS
"""Others' transactions take milliseconds."""
SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS spend (
  month TEXT NOT NULL, tenant TEXT NOT NULL, nanos INTEGER NOT NULL, tokens INTEGER NOT NULL,
  PRIMARY KEY (month, tenant)
) STRICT, WITHOUT ROWID
"""
ADD: Final = """
INSERT INTO spend VALUES (?, ?, ?, ?)
ON CONFLICT DO UPDATE SET nanos = nanos + excluded.nanos, tokens = tokens + excluded.tokens
"""


class Spend(NamedTuple):
    """Spend of one tenant in one month."""

    nanos: int
    tokens: int


Key: TypeAlias = tuple[str, str]
"""Month and tenant."""


class SpendFile:
    """One file.

    Args:
      path: made if it is not there.

    Raises:
      ConfigError: it cannot be used.
    """

    def __init__(self, path: str) -> None:
        try:
            # The folder is the operator's, of any mode: it often holds the tenants' file and more.
            make_private_folder(Path(path).parent)
            make_private_database(Path(path))
            self._connection = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{path} cannot keep what tenants have spent: {error}; set another "
                "server.tenants.quotas.spend_file"
            ) from error

    def add(self, spend: Mapping[Key, Spend], month: str) -> dict[Key, Spend]:
        """Add spend in one transaction.

        Returns:
          Sums of all servers, for `month` and the months of `spend`.

        Raises:
          sqlite3.Error: nothing was written.
        """
        connection = self._connection
        with transaction(connection):
            connection.executemany(ADD, [(*key, *more) for key, more in spend.items()])
            rows = [
                row
                for of in {month, *(of for of, _ in spend)}
                for row in connection.execute("SELECT * FROM spend WHERE month = ?", (of,))
            ]
        return {(of, tenant): Spend(nanos, tokens) for of, tenant, nanos, tokens in rows}

    def close(self) -> None:
        """Close it. No call may be under way."""
        self._connection.close()


LAST_FLUSH_S: Final = 3 * SECONDS
"""For the last write when this process ends; a transaction takes milliseconds."""


def time_of_day() -> float:
    """Return seconds since 1970: months are the same for all servers."""
    return time.time()


class MemoryStore:
    """All accounts of one server. `RedisStore` has the same methods; the same tests hold both.

    Args:
      config: bounds.
      observer: told of spend.
      file: keeps spend; None to forget it with the process.
      clock: monotonic.
      calendar: seconds since 1970.
    """

    def __init__(
        self,
        config: QuotaConfig,
        observer: SpendWatch,
        file: SpendFile | None = None,
        clock: Callable[[], float] = trio.current_time,
        calendar: Callable[[], float] = time_of_day,
    ) -> None:
        self._config = config
        self.num_servers = config.servers
        self._observer = observer
        self._file = file
        self._clock = clock
        self._calendar = calendar
        self._ledger = Ledger()
        self._unsaved: dict[Key, Spend] = {}
        self._totals: dict[Key, Spend] = {}
        self._writer = trio.CapacityLimiter(1)

    @property
    def is_well(self) -> bool:
        """Whether the limits hold for all servers that should share them: always."""
        return True

    @property
    def num_reserved(self) -> int:
        """Requests that are not settled."""
        return len(self._ledger.held)

    async def reserve(self, ask: QuotaAsk, limits: TenantLimits) -> QuotaVerdict:
        """Reserve the expected use of a request, or refuse it."""
        return self._ledger.reserve(ask, self.enforced(limits), self._month, self._clock())

    def settle(self, settlement: Settlement) -> None:
        """Replace a reservation by the use. Never waits or fails; called once per reservation."""
        month, tenant = self._month, settlement.tenant
        before = self._ledger.entry(tenant, month).spent
        self._ledger.settle(settlement, self.enforced(settlement.limits), month, self._clock())
        if self._file is None:
            self._observer.spent(tenant, before, before + settlement.cost)
        elif settlement.tokens or settlement.cost:
            self._add_unsaved((month, tenant), Spend(settlement.cost, settlement.tokens))

    def last_seen(self, tenant: str, limits: TenantLimits, within_s: float = math.inf) -> Account:
        """Return an account."""
        del within_s
        entry = self._ledger.entry(tenant, self._month)
        return entry.account(self.enforced(limits), self._clock())

    def enforced(self, limits: TenantLimits) -> TenantLimits:
        """Return this server's part."""
        return limits.shared_by(self.num_servers)

    async def account(self, tenant: str, limits: TenantLimits) -> Account:
        """Return an account."""
        return self.last_seen(tenant, limits)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write spend to the file until cancelled, and once more then."""
        if self._file is None:
            task_status.started()
            await trio.sleep_forever()
        await self._flush(self._file)
        task_status.started()
        try:
            while True:
                await trio.sleep(self._config.flush_s)
                await self._flush(self._file)
        finally:
            with trio.move_on_after(LAST_FLUSH_S, shield=True):
                await self._flush(self._file)

    @property
    def _month(self) -> str:
        return month_of(self._calendar())

    def _add_unsaved(self, key: Key, more: Spend) -> None:
        nanos, tokens = self._unsaved.get(key, Spend(0, 0))
        self._unsaved[key] = Spend(nanos + more.nanos, tokens + more.tokens)

    async def _flush(self, file: SpendFile) -> None:
        """Write unsaved spend to the file, and read the sums of all servers."""
        added, self._unsaved = self._unsaved, {}
        try:
            totals = await in_thread(lambda: file.add(added, self._month), self._writer)
        except BaseException as error:
            for key, more in added.items():
                self._add_unsaved(key, more)
            if not isinstance(error, sqlite3.Error | OverflowError):
                raise
            log.error("spend_not_written", reason=str(error))
            return
        present = self._month
        for (month, tenant), total in totals.items():
            if month == present and total != self._totals.get((month, tenant)):
                more = self._unsaved.get((month, tenant), Spend(0, 0))
                entry = self._ledger.entry(tenant, month)
                entry.spent, entry.used_tokens = (
                    total.nanos + more.nanos,
                    total.tokens + more.tokens,
                )
        self._totals = totals
        for (month, tenant), more in added.items():
            after = totals[month, tenant].nanos
            self._observer.spent(tenant, after - more.nanos, after)

"""Tenant accounts in memory, the spend file that outlives the process, and the observers of all
account stores.

The spend file blocks: call it from one thread at a time. Several servers on one host may share it:
each adds its own spending and reads the sum of all.
"""

from __future__ import annotations

import math
import operator
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
    from collections.abc import Callable, Iterable, Mapping

    from triolet.config import QuotaConfig
    from triolet.tenants.plans import Plan

    from .accounts import Account, QuotaAsk, QuotaVerdict, Settlement, TenantLimits


log = structlog.get_logger(__name__)


class QuotaObserver:
    """Receives events of limits and spending; this base class ignores them."""

    def refused(self, limit: str) -> None:
        """Called when a limit refuses a request."""

    def reserved(self, elapsed_s: float) -> None:
        """Called with the time that the store took for a reservation."""

    def unreserved(self, tenant: str) -> None:
        """Called when a request without a reservation is counted."""

    def cost(self, tenant: str, amount: float) -> None:
        """Called when a tenant is charged, in the operator's currency."""

    def auto_cost(self, model: str, amount: float, on_largest: float) -> None:
        """Called when a request for `auto` is charged, with its cost on the largest model."""

    def budget_watched(self, tenant: str, share: float) -> None:
        """Called before alerts for a share of a tenant's budget can occur."""

    def budget_alert(self, tenant: str, share: float) -> None:
        """Called when a tenant's spending crosses a share of its budget."""

    def store_failed(self) -> None:
        """Called when a call to the shared store fails."""


class SpendWatch:
    """Detects budget alerts and counts failed calls, for a store.

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
        """Log and count alerts for budget shares between a tenant's spending before and after
        [nanos].

        Each change is reported to one server, and spending only grows, so each alert occurs once.
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
        """Count a failed call to the shared store; the store logs the consequence."""
        del reason
        self._metrics.store_failed()


BUSY_S: Final = 5 * SECONDS
"""Lock timeout; other servers' transactions take milliseconds."""
SCHEMA: Final = (
    """
CREATE TABLE IF NOT EXISTS spend (
  month TEXT NOT NULL, tenant TEXT NOT NULL, nanos INTEGER NOT NULL, tokens INTEGER NOT NULL,
  PRIMARY KEY (month, tenant)
) STRICT, WITHOUT ROWID
""",
    """
CREATE TABLE IF NOT EXISTS charged_once (
  id TEXT NOT NULL PRIMARY KEY, nanos INTEGER NOT NULL, tokens INTEGER NOT NULL,
  at REAL NOT NULL
) STRICT, WITHOUT ROWID
""",
    "CREATE INDEX IF NOT EXISTS charged_once_at ON charged_once (at)",
)
ADD: Final = (
    """
INSERT INTO spend
SELECT :month, :tenant,
  max(0, :nanos - coalesce(sum(nanos), 0)), max(0, :tokens - coalesce(sum(tokens), 0))
FROM charged_once WHERE id = :once_id
ON CONFLICT DO UPDATE SET nanos = nanos + excluded.nanos, tokens = tokens + excluded.tokens
""",
    """
INSERT INTO charged_once SELECT :once_id, :nanos, :tokens, :at WHERE :once_id != ''
ON CONFLICT DO UPDATE SET nanos = max(nanos, excluded.nanos),
  tokens = max(tokens, excluded.tokens), at = excluded.at
""",
)
"""Add what exceeds earlier charges for the same work, and remember this charge."""


class Spend(NamedTuple):
    """Spending of one tenant in one month."""

    nanos: int
    tokens: int


Key: TypeAlias = tuple[str, str]
"""Month and tenant."""
SpendParts: TypeAlias = dict[str, Spend]
"""Spending by `once_id` (see `Settlement`); all other work is under the empty id."""


class SpendFile:
    """The SQLite file of tenants' spending.

    Args:
      path: the file's path; created if missing.
      charged_once_s: see `QuotaConfig`.

    Raises:
      ConfigError: it cannot be used.
    """

    def __init__(self, path: str, charged_once_s: float) -> None:
        self._charged_once_s = charged_once_s
        try:
            # The operator's folder, of any mode: it often holds the tenants file and more.
            make_private_folder(Path(path).parent)
            make_private_database(Path(path))
            self._connection = sqlite3.connect(
                path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            self._connection.execute("PRAGMA synchronous = FULL")
            for statement in SCHEMA:
                self._connection.execute(statement)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"{path} cannot store tenants' spending: {error}; set another "
                "server.tenants.quotas.spend_file"
            ) from error

    def add(
        self, spend: Mapping[Key, SpendParts], now: float
    ) -> tuple[dict[Key, Spend], dict[Key, Spend]]:
        """Add spending in one transaction.

        Args:
          spend: the spending.
          now: Unix time.

        Returns:
          Sums over all servers, for the present month and the months in `spend`: before this call,
          and after it.

        Raises:
          sqlite3.Error: nothing was written.
        """
        connection = self._connection
        months = {month_of(now), *(month for month, _ in spend)}
        with transaction(connection):
            before = self._sums(months)
            for (month, tenant), parts in spend.items():
                for once_id, more in parts.items():
                    names = {"month": month, "tenant": tenant, "once_id": once_id, "at": now}
                    for statement in ADD:
                        connection.execute(statement, names | more._asdict())
            forgotten = (now - self._charged_once_s,)
            connection.execute("DELETE FROM charged_once WHERE at <= ?", forgotten)
            return before, self._sums(months)

    def _sums(self, months: Iterable[str]) -> dict[Key, Spend]:
        rows = [
            row
            for of in months
            for row in self._connection.execute("SELECT * FROM spend WHERE month = ?", (of,))
        ]
        return {(month, tenant): Spend(nanos, tokens) for month, tenant, nanos, tokens in rows}

    def close(self) -> None:
        """Close the file. No call may be in progress."""
        self._connection.close()


LAST_FLUSH_S: Final = 3 * SECONDS
"""Deadline for the last write when this process ends; a transaction takes milliseconds."""


def time_of_day() -> float:
    """Return the Unix time, so that months are the same for all servers."""
    return time.time()


class MemoryStore:
    """All accounts of one server. `RedisStore` has the same methods and passes the same tests.

    Args:
      config: bounds.
      observer: receives spending.
      file: stores spending; None to lose it with the process.
      clock: monotonic clock.
      calendar: returns the Unix time.
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
        self._unsaved: dict[Key, SpendParts] = {}
        self._totals: dict[Key, Spend] = {}
        self._writer = trio.CapacityLimiter(1)

    @property
    def is_well(self) -> bool:
        """Whether the limits hold for all servers that should share them: always True."""
        return True

    @property
    def num_reserved(self) -> int:
        """Number of requests that are not settled."""
        return len(self._ledger.held)

    async def reserve(self, ask: QuotaAsk, limits: TenantLimits) -> QuotaVerdict:
        """Reserve the expected use of a request, or refuse it."""
        return self._ledger.reserve(ask, self.enforced(limits), self._month, self._clock())

    def settle(self, settlement: Settlement) -> None:
        """Replace a reservation by the use. Never blocks or fails; call once per reservation."""
        month, tenant = self._month, settlement.tenant
        before = self._ledger.entry(tenant, month).spent
        self._ledger.settle(settlement, self.enforced(settlement.limits), month, self._clock())
        if self._file is None:
            self._observer.spent(tenant, before, before + settlement.cost)
        elif settlement.tokens or settlement.cost:
            more = Spend(settlement.cost, settlement.tokens)
            self._add_unsaved((month, tenant), more, settlement.once_id)

    async def wait_saved(self) -> None:
        """Save all settlements so far, so that they are charged even if this process dies. If the
        file cannot be written, log an error and save them later."""
        if self._file is not None:
            await self._flush(self._file)

    def last_seen(self, tenant: str, limits: TenantLimits, within_s: float = math.inf) -> Account:
        """Return an account."""
        del within_s
        entry = self._ledger.entry(tenant, self._month)
        return entry.account(self.enforced(limits), self._clock())

    def enforced(self, limits: TenantLimits) -> TenantLimits:
        """Return this server's part of the limits."""
        return limits.shared_by(self.num_servers)

    async def account(self, tenant: str, limits: TenantLimits) -> Account:
        """Return an account."""
        return self.last_seen(tenant, limits)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write spending to the file until cancelled, then once more."""
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

    def _add_unsaved(self, key: Key, more: Spend, once_id: str = "") -> None:
        parts = self._unsaved.setdefault(key, {})
        merged = map(max if once_id else operator.add, parts.get(once_id, Spend(0, 0)), more)
        parts[once_id] = Spend(*merged)

    async def _flush(self, file: SpendFile) -> None:
        """Write unsaved spending to the file, and read the sums of all servers."""
        added, self._unsaved = self._unsaved, {}
        try:
            before, totals = await in_thread(
                lambda: file.add(added, self._calendar()), self._writer
            )
        except BaseException as error:
            is_broken = isinstance(error, sqlite3.Error | OverflowError)
            for key, parts in added.items():
                for once_id, more in parts.items():
                    # Drop the id, so that memory does not grow with each line while the file fails.
                    self._add_unsaved(key, more, "" if is_broken else once_id)
            if not is_broken:
                raise
            log.error("spend_not_written", reason=str(error))
            return
        present = self._month
        for key, total in totals.items():
            month, tenant = key
            if month == present and (key in added or total != self._totals.get(key)):
                sums = map(sum, zip(total, *self._unsaved.get(key, {}).values(), strict=True))
                entry = self._ledger.entry(tenant, month)
                entry.spent, entry.used_tokens = sums
        self._totals = totals
        for key in added:
            self._observer.spent(key[1], before.get(key, Spend(0, 0)).nanos, totals[key].nanos)

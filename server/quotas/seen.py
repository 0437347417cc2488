"""Accounts as they were when a store last told them, and what would be there by now. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .amounts import Account
from .buckets import Bucket

if TYPE_CHECKING:
    from .amounts import Limits


class Seen(NamedTuple):
    """An account, and when that was."""

    account: Account
    at: float


class SeenAccounts:
    """The last of each tenant."""

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}

    def note(self, tenant: str, account: Account, now: float) -> None:
        """Remember one."""
        self._seen[tenant] = Seen(account, now)

    def by_now(
        self, tenant: str, limits: Limits, now: float, within_s: float | None = None
    ) -> Account | None:
        """Return an account as it would be if nobody had touched it since; None if none was seen,
        or only one that is older than so much."""
        seen = self._seen.get(tenant)
        if seen is None or (within_s is not None and now - seen.at > within_s):
            return None
        account = seen.account
        return Account(
            _level(account.requests, seen.at, limits.requests, now),
            _level(account.tokens, seen.at, limits.tokens, now),
            account.in_flight,
            account.spent,
            account.used_tokens,
        )


def _level(level: float, at: float, limit: float | None, now: float) -> float:
    return 0.0 if limit is None else Bucket(level, at).level_at(limit, now)

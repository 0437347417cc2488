"""The tenants of a server: reads the operator's tenants file, applies its changes, and finds the
tenant of an API key.

triolet/tenants/form.py parses the file. A file with an error has no effect.
"""

from __future__ import annotations

import hmac
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import structlog
import trio

from triolet.errors import ConfigError, RequestError
from triolet.tenants.api_keys import digest_of
from triolet.tenants.form import read_tenants
from triolet.tenants.plans import ANONYMOUS, Tenants
from triolet.watched_file import WatchedFile

from ..text.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Set

    from triolet.config import TenantsConfig
    from triolet.tenants.plans import Prices, Tenant


log = structlog.get_logger(__name__)


def _take_all(tenants: Tenants, file: str) -> None:
    """Accept any tenants."""


class TenantFile:
    """The operator's tenants file.

    Args:
      path: the file's path.
      config: bounds.
      check: raises ConfigError, with the file's name, for tenants that this server cannot serve.
    """

    def __init__(
        self,
        path: str,
        config: TenantsConfig,
        check: Callable[[Tenants, str], None] = _take_all,
    ) -> None:
        self._file = WatchedFile(path, "tenants", config.max_bytes)
        self._config = config
        self._check = check

    def read(self) -> Tenants:
        """Return the tenants of the file.

        Raises:
          ConfigError: it cannot be read or is invalid.
        """
        tenants, path = self._read()
        self._check(tenants, path)
        return tenants

    def _read(self) -> tuple[Tenants, str]:
        path = str(self._file.path)
        return read_tenants(self._file.read(), path), path

    def open(self, left_out: Collection[str], zone: str = "") -> Tenancy:
        """Return the tenants that a server starts with.

        Args:
          left_out: models of the fleet that this server could not read. Only ladders that name one
            are rejected; their tenants use the configured ladder until the file changes, because
            the server must start for the other models.
          zone: the server's zone; empty for none.

        Raises:
          ConfigError: see `read`.
        """
        tenants, path = self._read()
        known = tenants.without_ladders_of(left_out)
        self._check(known, path)
        tenancy = Tenancy(known, zone)
        try:
            self._check(tenants, path)
        except ConfigError as error:
            tenancy.refuse(str(error))
            log.error("tenants_refused", reason=str(error))
        return tenancy

    async def run(self, tenancy: Tenancy, dismiss: Callable[[Set[str]], None]) -> None:
        """Apply each change of the file.

        Args:
          tenancy: receives the tenants.
          dismiss: ends the requests of tenants that were removed, disabled or bound to zones.
        """
        threads = trio.CapacityLimiter(1)
        while True:
            await trio.sleep(self._config.poll_s)
            if not self._file.has_settled():
                continue
            self._file.note_tried()
            try:
                tenants = await in_thread(self.read, threads)
            except ConfigError as error:
                tenancy.refuse(str(error))
                log.error("tenants_refused", reason=str(error))
                continue
            gone = tenancy.replace(tenants)
            log.info("tenants_changed", tenants=len(tenants.by_name), gone=sorted(gone)[:100])
            dismiss(gone)


MAX_KEY_CHARS: Final = 256
NO_KEY: Final = "this server asks for an API key; send it as `Authorization: Bearer KEY`"
WRONG_KEY: Final = (
    "the API key that was sent is wrong, or has expired; ask this server's operator for another"
)

_TENANT: Final[ContextVar[Tenant]] = ContextVar("tenant", default=ANONYMOUS)


def current_tenant() -> Tenant:
    """Return the tenant of the running task; ANONYMOUS without tenants."""
    return _TENANT.get()


def enter_tenant(tenant: Tenant) -> None:
    """Set the tenant of the running task and of tasks that it starts."""
    _TENANT.set(tenant)


@dataclass(frozen=True, slots=True)
class TenancyReport:
    """The state of the tenants file.

    Attributes:
      tenants: number of tenants, including disabled ones; 0 without a file.
      num_taken: number of files applied, including the first.
      num_refused: number of files with an error.
      problem: error of the newest file; empty if it was applied.
    """

    tenants: int = 0
    num_taken: int = 0
    num_refused: int = 0
    problem: str = ""


class Tenancy:
    """The current tenants.

    Args:
      tenants: from the tenants file; None without one, and then every client is accepted.
      zone: the server's zone; empty for none.

    Attributes:
      report: the state of the tenants file.
    """

    def __init__(self, tenants: Tenants | None = None, zone: str = "") -> None:
        self._tenants = tenants
        self._zone = zone
        self.report = TenancyReport()
        if tenants is not None:
            self.report = TenancyReport(len(tenants.by_name), 1)

    @property
    def is_open(self) -> bool:
        """Whether there are no tenants, so that every client is accepted."""
        return self._tenants is None

    def tenant_of(self, key: str | None, now: float) -> Tenant:
        """Return the tenant of a key.

        Args:
            key: the key that was sent.
            now: the Unix time.

          Raises:
            RequestError: 401 if no key, or a wrong or expired one, was sent; 403 if the tenant is
            disabled; 421 if its data must stay out of this server's zone.
        """
        if self._tenants is None:
            return ANONYMOUS
        if not key:
            raise _key_refused(NO_KEY)
        if len(key) > MAX_KEY_CHARS:
            raise _key_refused(WRONG_KEY)
        digest = digest_of(key)
        # The look-up compares digests, which do not reveal how close a wrong key was.
        entry = self._tenants.of_digest(digest)
        found = digest if entry is not None else "0" * len(digest)
        if not hmac.compare_digest(found, digest) or entry is None:
            raise _key_refused(WRONG_KEY)
        tenant, stored = entry
        if stored.until is not None and now >= stored.until:
            raise _key_refused(WRONG_KEY)
        return self._served(tenant)

    def tenant_named(self, name: str) -> Tenant:
        """Return a tenant by name, for an internal request.

        Raises:
          RequestError: 401 if it was removed; 403 if it is disabled; 421 if its data must stay out
            of this server's zone.
        """
        if self._tenants is None:
            return ANONYMOUS
        tenant = self._tenants.by_name.get(name)
        if tenant is None:
            raise _key_refused(f"tenant {name} no longer exists; ask the operator of this server")
        return self._served(tenant)

    @property
    def all_tenants(self) -> Collection[Tenant]:
        """All tenants, including disabled ones; ANONYMOUS without tenants."""
        return (ANONYMOUS,) if self._tenants is None else self._tenants.by_name.values()

    def prices_of(self, *names: str) -> Prices:
        """Return a model's current prices."""
        return (self._tenants or NO_TENANTS).prices_of(*names)

    def replace(self, tenants: Tenants) -> frozenset[str]:
        """Replace the tenants; return the names of those that were removed, disabled, or bound to
        zones that their requests may have left."""
        before = {} if self._tenants is None else self._tenants.by_name
        self._tenants, after = tenants, tenants.by_name
        self.report = TenancyReport(len(after), self.report.num_taken + 1, self.report.num_refused)
        return frozenset(
            name
            for name, tenant in before.items()
            if not tenant.is_disabled
            and (
                name not in after
                or after[name].is_disabled
                or not tenant.placement.is_within(after[name].placement)
            )
        )

    def refuse(self, problem: str) -> None:
        """Record the error of a newer file; the tenants stay as they were."""
        self.report = replace(self.report, num_refused=self.report.num_refused + 1, problem=problem)

    def _served(self, tenant: Tenant) -> Tenant:
        """Return the tenant if this server may serve it."""
        zones = tenant.placement.zones
        if tenant.is_disabled:
            raise RequestError(
                f"the tenant {tenant.name} is disabled; ask the operator of this server",
                status=403,
                code="permission_denied",
            )
        if zones and self._zone not in zones:
            raise RequestError(
                f"requests of the tenant {tenant.name} must stay in the zone "
                f"{' or '.join(sorted(zones))}, and this server is in "
                f"{self._zone or 'no zone'}; send them to the address of a server there",
                status=421,
                code="wrong_zone",
            )
        return tenant


NO_TENANTS: Final = Tenants((), {}, {})


def _key_refused(message: str) -> RequestError:
    return RequestError(message, status=401, code="invalid_api_key")

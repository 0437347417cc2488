"""Service classes, and the scheduling data of a request: tenant, class, weight, shares and workers.

The data is sent with each request from the API to the queue and to the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

CLASS_STEP: Final = 1000
"""Distance between the priorities of two classes: a client's own priority (-100 to 100) never moves
a request into another class."""
SHARE_STEP: Final = 300
"""Added within a class for tenants above their share: more than a client's own priority, and both
together less than half of `CLASS_STEP`."""


class ServiceClass(IntEnum):
    """Priority of a request; lower values go first. Under overload the highest is refused first."""

    CRITICAL = 0
    """A person or process waits, and the operator has promised a time."""
    DEFAULT = 1
    SHEDDABLE = 2
    """Served while there is room; refused first."""
    BATCH = 3
    """Work with hours of time: lines of batches. Waits longest, but is paused rather than
    refused."""


CLASS_OF_NAME: Final = {one.name.lower(): one for one in ServiceClass}
"""Service classes by their names in settings."""


def class_of(rank: int) -> ServiceClass:
    """Return the class in a worker's rank (`Scheduling.rank`)."""
    nearest = round(rank / CLASS_STEP) + ServiceClass.DEFAULT
    return ServiceClass(min(max(nearest, ServiceClass.CRITICAL), ServiceClass.BATCH))


class Band(NamedTuple):
    """Order of computing: by class, and within a class tenants below their share first.

    Attributes:
      service_class: service class of the request.
      is_over_share: its tenant used more than its share when the request was sent to workers.
    """

    service_class: ServiceClass = ServiceClass.DEFAULT
    is_over_share: bool = False


DEFAULT_BAND: Final = Band()


def band_of(rank: int) -> Band:
    """Return the band in a worker's rank (`Scheduling.rank`)."""
    service_class = class_of(rank)
    return Band(service_class, rank - _floor(service_class) > SHARE_STEP // 2)


def rank_without_share(rank: int) -> int:
    """Return a rank without its share step: the class and the client's own priority."""
    return rank - SHARE_STEP * band_of(rank).is_over_share


class Placement(NamedTuple):
    """Restricts the workers that a tenant's requests may use.

    Attributes:
      zones: zones that the data must not leave; empty for any.
      pools: names of the pools; empty for the shared pool, the workers without a pool.
      has_overflow: whether requests may use the shared pool if these pools have no room.
    """

    zones: frozenset[str] = frozenset()
    pools: frozenset[str] = frozenset()
    has_overflow: bool = False

    def admits(self, zone: str, pool: str, *, is_overflow: bool = True) -> bool:
        """Return whether requests may use a worker.

        Args:
          zone: its zone.
          pool: its pool.
          is_overflow: whether to include the shared pool if `has_overflow`.
        """
        if self.zones and zone not in self.zones:
            return False
        if not self.pools or (not pool and is_overflow and self.has_overflow):
            return not pool
        return pool in self.pools

    def meets(self, other: Placement) -> bool:
        """Return whether some workers are in both placements, overflow apart."""
        if self.zones and other.zones and self.zones.isdisjoint(other.zones):
            return False
        return self.pools == other.pools or not self.pools.isdisjoint(other.pools)

    def is_within(self, other: Placement) -> bool:
        """Return whether another placement allows all of its zones."""
        return not other.zones or (bool(self.zones) and self.zones <= other.zones)

    def __str__(self) -> str:
        """Return the text after "worker" in a message; empty without restrictions."""
        where = f" in the pool {' or '.join(sorted(self.pools))}" if self.pools else ""
        if self.has_overflow:
            where += " or in the shared pool"
        return f"{where} in the zone {' or '.join(sorted(self.zones))}" if self.zones else where


ANYWHERE: Final = Placement()
"""The shared pool, in any zone."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How one request is scheduled.

    Attributes:
      tenant: its name; empty without tenants.
      flow: the fairness id from a trusted gateway; empty without one.
      weight: the tenant's share among those waiting in the same class; above 0.
      service_class: its priority.
      max_running: most sequences of the tenant on workers at once; None for no limit.
      kv_share: share of all decode blocks that the tenant may hold at once, above 0 and up to 1.
      cache_share: share of a worker's prefix cache for the tenant's KV, above 0 and up to 1.
      placement: workers that it may use.
    """

    tenant: str = ""
    weight: float = 1.0
    service_class: ServiceClass = ServiceClass.DEFAULT
    max_running: int | None = None
    kv_share: float = 1.0
    cache_share: float = 1.0
    placement: Placement = ANYWHERE
    flow: str = ""

    @property
    def claimant(self) -> str:
        """The owner of a share of the queue, rows and caches: the tenant, or without tenants the
        flow."""
        return self.tenant or self.flow

    def priority(self, own: int) -> int:
        """Combine class and own priority into one number: lower is earlier, and the class decides
        first."""
        return _floor(self.service_class) + own

    def rank(self, own: int, *, is_over_share: bool = False) -> int:
        """Return the rank for workers. With claimants it contains only class and share: workers
        compare requests of all claimants, but a client's priority applies only among its own
        requests.

        Args:
          own: the client's priority, -100 to 100.
          is_over_share: its tenant uses more than its share.
        """
        return self.priority(0 if self.claimant else own) + SHARE_STEP * is_over_share


def _floor(service_class: ServiceClass) -> int:
    return (service_class - ServiceClass.DEFAULT) * CLASS_STEP


DEFAULT_SCHEDULING: Final = Scheduling()
"""For a request without a service tier, where there are no tenants."""

"""Service classes, and how one request is scheduled: tenant, class, weight and shares.

Pure data that travels with each request from the edge to the queue and on to the workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

CLASS_STEP: Final = 1000
"""Between the priorities of two classes: what a client may say of its own requests (-100 to 100)
never reaches another class."""
SHARE_STEP: Final = 300
"""Added to requests of a tenant over its share, in a class: above all that a client may say, and
both together below half of `CLASS_STEP`."""


class ServiceClass(IntEnum):
    """How early a request goes; the lower value first. Under overload the highest falls first."""

    CRITICAL = 0
    """A person or a process waits, and the operator has promised something."""
    DEFAULT = 1
    SHEDDABLE = 2
    """Welcome while there is room; refused first."""
    BATCH = 3
    """Whatever has hours: lines of batches. Waits longest, but is paused rather than refused."""


def class_of(rank: int) -> ServiceClass:
    """Return the class of what was told to workers (`Scheduling.rank`)."""
    nearest = round(rank / CLASS_STEP) + ServiceClass.DEFAULT
    return ServiceClass(min(max(nearest, ServiceClass.CRITICAL), ServiceClass.BATCH))


class Band(NamedTuple):
    """The order of computing: by class, and in a class tenants under their share first.

    Attributes:
      service_class: the request's.
      is_over_share: its tenant asked for more than its share when it was sent to workers.
    """

    service_class: ServiceClass = ServiceClass.DEFAULT
    is_over_share: bool = False


DEFAULT_BAND: Final = Band()


def band_of(rank: int) -> Band:
    """Return the band of what was told to workers (`Scheduling.rank`)."""
    service_class = class_of(rank)
    return Band(service_class, rank - _floor(service_class) > SHARE_STEP // 2)


def rank_without_share(rank: int) -> int:
    """Return a rank without its share step: the class, and the priority the client set."""
    return rank - SHARE_STEP * band_of(rank).is_over_share


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How one request is scheduled.

    Attributes:
      tenant: its name; empty where there are no tenants.
      weight: of the tenant's share among those that wait in the same class; above 0.
      service_class: how early it goes.
      max_running: sequences that the tenant may have on workers at once; None for no limit.
      kv_share: of all decode blocks that the tenant may hold at once, above 0 and up to 1.
      cache_share: of a worker's prefix cache that the tenant's KV may keep, above 0 and up to 1.
    """

    tenant: str = ""
    weight: float = 1.0
    service_class: ServiceClass = ServiceClass.DEFAULT
    max_running: int | None = None
    kv_share: float = 1.0
    cache_share: float = 1.0

    def priority(self, own: int) -> int:
        """Return one number for both: lower is earlier, and the class stands above all."""
        return _floor(self.service_class) + own

    def rank(self, own: int, *, is_over_share: bool = False) -> int:
        """Return what workers are told: where there are tenants nothing but the class and the
        share, because workers compare all tenants', and what a client says of its own requests is
        for those.

        Args:
          own: what the client said, -100 to 100.
          is_over_share: its tenant asks for more than its share.
        """
        return self.priority(0 if self.tenant else own) + SHARE_STEP * is_over_share


def _floor(service_class: ServiceClass) -> int:
    return (service_class - ServiceClass.DEFAULT) * CLASS_STEP


DEFAULT_SCHEDULING: Final = Scheduling()
"""Of a request without a service tier, where there are no tenants."""

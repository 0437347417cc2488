"""Settings of service level objectives, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from .limits import Count  # noqa: TC001 (get_type_hints reads the annotations)


@dataclass(frozen=True, slots=True)
class ObjectivesConfig:
    """Service level objectives (docs/SLO.md)."""

    file: str | None = None
    """File with the objectives, in the format OpenSLO v1; None for those that Triolet ships."""
    max_objectives: Count = 32
    """Objectives in the file. Each takes 11 KiB of counts, and 2 KiB for each version of a model. A
    request costs 12 microseconds with the five that are shipped."""
    shown_tenants: Count = 20
    """Tenants with counters of their own, those with the most tokens; all others count together as
    `other`. Detail for each tenant is in the usage ledger."""
    tracked_tenants: Count = 1024
    """Tenants whose tokens are compared for that. They are ranked again after as many requests."""
    kept_versions: Count = 128
    """Versions of models with counts of their own. A further one replaces the least recently used.
    More than serve at once: two for each of 64 models."""

"""Settings of service level objectives, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

from .limits import Count  # noqa: TC001 (get_type_hints reads the annotations)


@dataclass(frozen=True, slots=True)
class ObjectivesConfig:
    """Service level objectives (docs/SLO.md)."""

    file: str | None = None
    """File with objectives in the format OpenSLO v1; None for those that Triolet ships."""
    max_objectives: Count = 32
    """Most objectives in the file. Each takes 11 KiB, and 2 KiB for each version of a model. With
    the five that are shipped, a request costs 12 microseconds."""
    shown_tenants: Count = 20
    """Tenants with their own counters: those with the most tokens. The rest count together as
    `other`; the usage ledger has every tenant."""
    tracked_tenants: Count = 1024
    """Tenants whose tokens are compared for that; they are ranked again after this many
    requests."""
    kept_versions: Count = 128
    """Versions of models with their own counters; a further one replaces the least recently used.
    Enough for two versions of each of 64 models."""

"""Worker-seconds of each model and version: how long its worker processes have run, together. Pure.

The supervisor counts them, because it sees every process begin and end; what it tells is the sum
since the fleet began. Here the sums of earlier fleets are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

EARLIER: Final = ""
"""Stands for all fleets but the last."""

VERSIONS_TOLD: Final = 5
"""Of each model, to servers: their number rises for ever, and a line has MAX_LINE_BYTES."""
OTHERS: Final = "other"
"""Stands for all versions of a model but those, so that the sum is that of its processes."""


class Version(NamedTuple):
    """What seconds are counted for.

    Attributes:
      model: its name.
      digest: of the version; empty where it is not in the store.
    """

    model: str
    digest: str


class Account:
    """Worker-seconds of all versions.

    Args:
      known: by the run of a supervisor and version, as they were written down.

    Attributes:
      known: the same, with what was told since.
    """

    def __init__(self, known: Mapping[tuple[str, Version], float] | None = None) -> None:
        self.known = dict(known or {})

    def note(self, run: str, told: Mapping[Version, float]) -> None:
        """Take in what the supervisor has counted in its present run."""
        for past, version in [key for key in self.known if key[0] not in (run, EARLIER)]:
            seconds = self.known.pop((past, version))
            self.known[EARLIER, version] = self.known.get((EARLIER, version), 0.0) + seconds
        for version, seconds in told.items():
            self.known[run, version] = seconds

    def seconds(self) -> dict[Version, float]:
        """Return the worker-seconds of each version."""
        sums: dict[Version, float] = {}
        for (_, version), seconds in self.known.items():
            sums[version] = sums.get(version, 0.0) + seconds
        return sums

    def by_model(self) -> dict[str, dict[str, float]]:
        """Return the worker-seconds of the last VERSIONS_TOLD versions of each model by digest, and
        those of its earlier ones together as OTHERS."""
        present = {version for run, version in self.known if run != EARLIER}
        found: dict[str, dict[str, float]] = {}
        # Those of the present run come last, whenever they were first seen.
        for version, seconds in sorted(self.seconds().items(), key=lambda one: one[0] in present):
            found.setdefault(version.model, {})[version.digest] = seconds
        for of_model in found.values():
            earlier = list(of_model)[:-VERSIONS_TOLD]
            if earlier:
                of_model[OTHERS] = sum(of_model.pop(digest) for digest in earlier)
        return found

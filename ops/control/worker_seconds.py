"""Worker-seconds of each model and version: how long its worker processes have run, together. Pure.

The supervisor counts them, because it sees every process begin and end; what it tells is the sum
since the fleet began, or since the model was added. Here the sums of earlier ones are added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

EARLIER: Final = ""
"""Stands for all fleets but the last, and for models that this one had and dropped."""

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


class SecondsAccount:
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
        self._close([key for key in self.known if key[0] != run])
        for version, seconds in told.items():
            # One version may have taken the place of another one, whose workers went on.
            before = (
                known_seconds
                for (its_run, one), known_seconds in self.known.items()
                if its_run == run and one.model == version.model and one != version
            )
            self.known[run, version] = max(0.0, seconds - sum(before))

    def note_dropped(self, is_there: Callable[[str], bool]) -> None:
        """Take in that models were dropped: the supervisor counts anew for one that is added again.

        Args:
          is_there: whether the supervisor still has the model of this name.
        """
        self._close([key for key in self.known if not is_there(key[1].model)])

    def _close(self, keys: Iterable[tuple[str, Version]]) -> None:
        for key in keys:
            if key[0] != EARLIER:
                earlier = EARLIER, key[1]
                self.known[earlier] = self.known.get(earlier, 0.0) + self.known.pop(key)

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

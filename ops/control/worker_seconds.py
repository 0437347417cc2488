"""Adds up worker-seconds: the total run time of the worker processes of each model version.

The supervisor reports the sum since the fleet started or the model was added. This account adds the
sums of earlier runs, which it loads from the journal. No I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

EARLIER: Final = ""
"""Run id for all earlier runs, and for models that the current fleet has dropped."""

VERSIONS_TOLD: Final = 5
"""Versions per model to publish to servers: their number grows without bound, and a line is limited
to MAX_LINE_BYTES."""
OTHERS: Final = "other"
"""Key for the sum of all other versions of a model."""


class Version(NamedTuple):
    """A version of a model.

    Attributes:
      model: name of the model.
      digest: digest of the version; empty if it is not in the store.
    """

    model: str
    digest: str


class SecondsAccount:
    """Worker-seconds of all versions.

    Args:
      known: seconds by supervisor run and version, from the journal.

    Attributes:
      known: the current seconds by supervisor run and version.
    """

    def __init__(self, known: Mapping[tuple[str, Version], float] | None = None) -> None:
        self.known = dict(known or {})

    def note(self, run: str, told: Mapping[Version, float]) -> None:
        """Record the supervisor's counts of its current run."""
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
        """Close the counts of dropped models: the supervisor starts at 0 if one is added again.

        Args:
          is_there: returns whether the supervisor still has a model.
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
        the sum of its earlier ones as OTHERS."""
        present = {version for run, version in self.known if run != EARLIER}
        found: dict[str, dict[str, float]] = {}
        # Versions of the current run come last, whenever they were first seen.
        for version, seconds in sorted(self.seconds().items(), key=lambda one: one[0] in present):
            found.setdefault(version.model, {})[version.digest] = seconds
        for of_model in found.values():
            earlier = list(of_model)[:-VERSIONS_TOLD]
            if earlier:
                of_model[OTHERS] = sum(of_model.pop(digest) for digest in earlier)
        return found

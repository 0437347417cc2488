"""Worker-seconds of each model and version: the time from the start of each worker process to its
end. Pure; times are seconds since the machine was started.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Version: TypeAlias = tuple[str, str]
"""Name of a model, digest of its version."""


class Running(NamedTuple):
    """A worker process that runs.

    Attributes:
      pid: of the process.
      began: when it was started.
      model: that it works for.
      digest: of its version.
    """

    pid: int
    began: float
    model: str
    digest: str


@dataclass(frozen=True, slots=True)
class Life:
    """A worker process, from its start until it was last seen.

    Attributes:
      pid: of the process.
      began: when it was started.
      seen: when it was last known to run.
      model: that it works for.
      digest: of its version.
    """

    pid: int
    began: float
    seen: float
    model: str
    digest: str

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return max(0.0, self.seen - self.began)


class Account:
    """Worker-seconds of all versions.

    Args:
      ended: seconds and number of processes that have ended, by version.
      lives: of the others, as they were last seen.

    Attributes:
      ended: as given, and what has ended since.
    """

    def __init__(
        self,
        ended: Mapping[Version, tuple[float, int]] | None = None,
        lives: Iterable[Life] = (),
    ) -> None:
        self.ended = dict(ended or {})
        self._lives = {(life.pid, life.began): life for life in lives}

    @property
    def lives(self) -> tuple[Life, ...]:
        """Processes that run."""
        return tuple(self._lives.values())

    def see(self, running: Iterable[Running], now: float) -> bool:
        """Take in which processes run now; return whether any has begun or ended."""
        present = {(one.pid, one.began): one for one in running}
        gone = self._lives.keys() - present.keys()
        new = present.keys() - self._lives.keys()
        for key in gone:
            self._end(self._lives.pop(key))
        for key, one in present.items():
            life = self._lives.get(key) or Life(one.pid, one.began, now, one.model, one.digest)
            self._lives[key] = replace(life, seen=now)
        return bool(gone or new)

    def seconds(self) -> dict[Version, float]:
        """Return the worker-seconds of each version up to the last look."""
        sums = {version: seconds for version, (seconds, _) in self.ended.items()}
        for life in self._lives.values():
            version = (life.model, life.digest)
            sums[version] = sums.get(version, 0.0) + life.seconds
        return sums

    def _end(self, life: Life) -> None:
        seconds, count = self.ended.get((life.model, life.digest), (0.0, 0))
        self.ended[life.model, life.digest] = (seconds + life.seconds, count + 1)

"""Cores that a worker has nothing to compute with, lent to its siblings on the same machine.

Each worker has two bytes of one file. It locks the first while it has work; whoever borrows its
cores for a step locks the second. Locks because the kernel takes them from whoever dies: nothing
has to be given back, and nobody is asked. A worker that gets work never waits for what is lent, but
begins with its own cores, which it then shares until the borrower's step has returned.

Knows no steps and no rows.
"""

from __future__ import annotations

import os
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, lockf
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from triolet.config_siblings import LendingConfig

WANTED_BACK: Final = 0.5
"""Of a step an owner does without its cores, on average, if it gets work within that step."""


class Cores:
    """The cores of one worker, and those that others can spare.

    Steps come one after the other, each between `take` and `give_back`, and `rest` between steps.

    Args:
      config: who the others are.
      own: how many cores each worker has.
    """

    def __init__(self, config: LendingConfig, own: int) -> None:
        self._own = own
        self._place = config.place
        self._others = [place for place in range(config.places) if place != config.place]
        self._file = os.open(config.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._is_working = False
        self._borrowed: list[int] = []

    def close(self) -> None:
        """Leave the cores to the others. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def take(self) -> int:
        """Say that this worker has work; return how many cores it may use until `give_back`."""
        self._is_working = self._is_working or self._try_lock(_work_of(self._place))
        if self._is_working:
            self._borrowed = [place for place in self._others if self._borrow(place)]
        return self._own * (1 + len(self._borrowed))

    def give_back(self) -> float:
        """Return what was borrowed; the result is how many times as many cores as its own this
        worker had, on average: those whose owners want them back by now it had half of the time, as
        far as anybody knows."""
        borrowed, self._borrowed = self._borrowed, []
        speedup = 1.0
        for place in borrowed:
            self._unlock(_loan_of(place))
            speedup += WANTED_BACK if self._is_at_work(place) else 1.0
        return speedup

    def rest(self) -> None:
        """Say that this worker has nothing to compute for now."""
        if self._is_working:
            self._is_working = False
            self._unlock(_work_of(self._place))

    def _borrow(self, place: int) -> bool:
        """Take the cores of another worker, unless it or somebody else uses them."""
        return not self._is_at_work(place) and self._try_lock(_loan_of(place))

    def _is_at_work(self, place: int) -> bool:
        if not self._try_lock(_work_of(place), LOCK_SH):
            return True
        self._unlock(_work_of(place))
        return False

    def _try_lock(self, byte: int, kind: int = LOCK_EX) -> bool:
        try:
            lockf(self._file, kind | LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX leaves the choice
            return False
        return True

    def _unlock(self, byte: int) -> None:
        lockf(self._file, LOCK_UN, 1, byte)


def _work_of(place: int) -> int:
    return 2 * place


def _loan_of(place: int) -> int:
    return 2 * place + 1

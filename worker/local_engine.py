"""The engine of a worker process (`EnginePort`): the loaded model with its KV pool. Also lends CPU
cores from idle to busy workers on the same machine.

For lending, each worker has two bytes of a shared file. It locks the first while it has work; a
worker that borrows its cores for a step locks the second. The kernel releases the locks of a dead
process. A worker that gets work starts immediately and shares lent cores until the borrower's step
returns.

If other programs use the idle worker's cores, borrowing slows short steps, because each layer waits
for its slowest thread. So steps of similar size are timed with and without borrowing.
"""

from __future__ import annotations

import os
import time
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, lockf
from typing import TYPE_CHECKING, Final

from engine.native.model import NativeModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.batch import Constraint, Sampled, StepRow
    from engine.block_ledger import BlockLedger
    from engine.load import Engine
    from engine.pace import Pace
    from engine.prefix_cache import PrefixCache
    from triolet.config import LendingConfig
    from triolet.sampling import SamplingParams


WANTED_BACK: Final = 0.5
"""Average share of a step that an owner shares its cores, if it gets work during that step."""


TRY_EVERY: Final = 16
"""One step in this many tries the slower way again, because other programs come and go."""
NEWEST_SHARE: Final = 1 / 8
"""Weight of the newest step in the mean duration."""


class BorrowingTrials:
    """Decides whether a step should borrow cores, from the durations of earlier steps of similar
    size."""

    def __init__(self) -> None:
        # Keyed by the number of bits of the size, and by whether cores were borrowed.
        self._mean_s: dict[tuple[int, bool], float] = {}
        self._counts: dict[int, int] = {}

    def pays(self, num_tokens: int) -> bool:
        """Return whether the next step should borrow."""
        size = num_tokens.bit_length()
        alone_s, borrowed_s = (self._mean_s.get((size, way)) for way in (False, True))
        if alone_s is None or borrowed_s is None:
            return borrowed_s is None
        self._counts[size] = (self._counts.get(size, 0) + 1) % TRY_EVERY
        return (borrowed_s < alone_s) != (self._counts[size] == 0)

    def took(self, num_tokens: int, seconds: float, *, is_borrowed: bool) -> None:
        """Record a step's duration."""
        key = num_tokens.bit_length(), is_borrowed
        mean_s = self._mean_s.get(key, seconds)
        self._mean_s[key] = mean_s + NEWEST_SHARE * (seconds - mean_s)


class Cores:
    """The cores of one worker, and those it can borrow.

    Steps run one after the other, each between `take` and `give_back`, with `rest` between steps.

    Args:
      config: names the other workers.
      own: number of cores of each worker.
    """

    def __init__(self, config: LendingConfig, own: int) -> None:
        self._own = own
        self._place = config.place
        self._others = [place for place in range(config.places) if place != config.place]
        self._file = os.open(config.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._is_working = False
        self._borrowed: list[int] = []

    def close(self) -> None:
        """Leave the cores to the others for good. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def take(self, *, borrows: bool = True) -> int:
        """Mark this worker as busy; return how many cores it may use until `give_back`.

        Args:
          borrows: whether to use the cores of idle workers too.
        """
        self._is_working = self._is_working or self._try_lock(_work_of(self._place))
        if self._is_working and borrows:
            self._borrowed = [place for place in self._others if self._borrow(place)]
        return self._own * (1 + len(self._borrowed))

    def give_back(self) -> float:
        """Return borrowed cores. The result is the average number of cores divided by the worker's
        own; cores of an owner that has become busy count as available half of the time."""
        borrowed, self._borrowed = self._borrowed, []
        speedup = 1.0
        for place in borrowed:
            self._unlock(_loan_of(place))
            speedup += WANTED_BACK if self._is_at_work(place) else 1.0
        return speedup

    def rest(self) -> None:
        """Mark this worker as idle."""
        if self._is_working:
            self._is_working = False
            self._unlock(_work_of(self._place))

    def _borrow(self, place: int) -> bool:
        """Borrow the cores of another worker, unless they are in use."""
        return not self._is_at_work(place) and self._try_lock(_loan_of(place))

    def _is_at_work(self, place: int) -> bool:
        if not self._try_lock(_work_of(place), LOCK_SH):
            return True
        self._unlock(_work_of(place))
        return False

    def _try_lock(self, byte: int, kind: int = LOCK_EX) -> bool:
        try:
            lockf(self._file, kind | LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX allows either
            return False
        return True

    def _unlock(self, byte: int) -> None:
        lockf(self._file, LOCK_UN, 1, byte)


def _work_of(place: int) -> int:
    return 2 * place


def _loan_of(place: int) -> int:
    return 2 * place + 1


class LocalEngine:
    """One loaded model with its pool. See engine_port.EnginePort.

    Args:
      loaded: the model.
      cores: for its steps; None for those of the device's thread. Only our own kernels compute the
        same bits with any number of cores, so only they borrow.
    """

    def __init__(self, loaded: Engine, cores: Cores | None = None) -> None:
        self._loaded = loaded
        model = loaded.runner.model
        self._model = model if isinstance(model, NativeModel) else None
        self._cores = None if self._model is None else cores
        self._trials = BorrowingTrials()
        self.speedup = 1.0

    @property
    def ledger(self) -> BlockLedger:
        """The leases of blocks."""
        return self._loaded.ledger

    @property
    def prefix_cache(self) -> PrefixCache:
        """The content of cached blocks."""
        return self._loaded.prefix_cache

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._loaded.pool.layout.block_size

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self._loaded.pool.bytes_per_block

    @property
    def max_model_len(self) -> int:
        """Context length in tokens."""
        return self._loaded.max_model_len

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._loaded.model_config.vocab_size

    @property
    def fingerprint(self) -> str:
        """Equal if and only if two workers can exchange KV."""
        return self._loaded.fingerprint

    @property
    def adapters(self) -> frozenset[bytes]:
        """Digests of the adapters that rows may name."""
        return self._loaded.adapters

    @property
    def pace(self) -> Pace:
        """Capacity and duration of steps."""
        return self._loaded.pace

    def constrain(self, sampling: SamplingParams) -> Constraint | None:
        """Return the constraint of a completion: grammar and reasoning budget."""
        return self._loaded.constraints.constraint_of(sampling)

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Compute one step, on the device's thread."""
        if self._cores is None or self._model is None:
            return self._loaded.runner.step(rows)
        num_tokens = sum(len(row.token_ids) for row in rows)
        self._model.num_threads = self._cores.take(borrows=self._trials.pays(num_tokens))
        began_s = time.perf_counter()
        try:
            sampled = self._loaded.runner.step(rows)
        finally:
            self.speedup = self._cores.give_back()
        took_s = time.perf_counter() - began_s
        self._trials.took(num_tokens, took_s, is_borrowed=self.speedup > 1.0)
        return sampled

    def rest(self) -> None:
        """Lend the cores to the others."""
        if self._cores is not None:
            self._cores.rest()

    def check_device(self) -> None:
        """Return when the device has finished everything launched on it."""
        self._loaded.pool.check_device()

    def export_blocks(self, block_ids: Sequence[int], into: memoryview | None = None) -> memoryview:
        """Copy blocks out."""
        return self._loaded.pool.export_blocks(block_ids, into)

    def pin(self, memory: memoryview) -> bool:
        """Prepare memory for repeated exports."""
        return self._loaded.pool.pin(memory)

    def unpin(self, memory: memoryview) -> None:
        """Undo `pin`, before the memory is freed."""
        self._loaded.pool.unpin(memory)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block over another one that no running step reads."""
        self._loaded.pool.copy_block(source, target)

    def import_blocks(self, block_ids: Sequence[int], payload: bytes | memoryview) -> None:
        """Overwrite blocks that no running step reads."""
        self._loaded.pool.import_blocks(block_ids, payload)

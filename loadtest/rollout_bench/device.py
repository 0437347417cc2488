"""`python -m loadtest.rollout_bench.device COMMAND …`: run `triolet` with devices that only take
time and have the faults of candidates, and with a journal of control that can break.

Everything else is the product: processes, templates, sockets, frames, leases, blocks. The faults
of a version are in the file DIGEST.json of the folder `FAULTS`; without the file it has none. A
device looks at the file before each step, so a fault can begin while the version serves.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import msgspec

from engine.batch import Barred, Sampled
from ops.template import SERVER_MODULES
from simulation.engine import TOKEN, only_token
from simulation.modelled import StepCost
from simulation.timed import TimedEngine
from triolet.ids import Role
from triolet.sqlite import transaction
from triolet.units import MILLISECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine.batch import StepRow
    from engine.load import Engine

COMMAND: Final = (sys.executable, "-m", "loadtest.rollout_bench.device")
"""Command that runs `triolet`."""
FAULTS: Final = "TRIOLET_BENCH_FAULTS"
"""Environment variable with the folder of faults."""
BROKEN_JOURNAL: Final = "journal"
"""While this file is in that folder, control cannot write rollouts to its journal."""


class DeviceCost(StepCost):
    """Duration of a step. Steps without decode rows have no fixed part: the judge's model of costs
    has none."""

    def of(self, rows: Sequence[StepRow]) -> float:
        """Return the duration of a step in seconds."""
        return StepCost.of(self, rows) - self.step_s * (not any(row.is_decode for row in rows))


COST: Final = DeviceCost(20 * MILLISECONDS, 1 * MILLISECONDS, 1 * MILLISECONDS)
"""A prompt of 40 tokens takes 40 ms, a decode step 20: long compared with pauses of the machine.
Four prefill workers are mostly idle at 20 prompts a second."""


class DeviceFault(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with a version's devices.

    Attributes:
      errors: share of prompts for which they compute numbers that are not finite.
      marker: prompts with this token fail in the same way.
      slower: factor of the time of prompts.
      longer_than: tokens that a prompt must exceed to be slower.
      dearer: factor of the time of steps.
      token: the token that they choose.
      is_computed: whether they compute the model, with all that is wrong with its weights.
    """

    errors: float = 0.0
    marker: int = -1
    slower: float = 1.0
    longer_than: int = 0
    dearer: float = 1.0
    token: int = TOKEN
    is_computed: bool = False

    def fails(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt fails, in each attempt alike."""
        is_drawn = crc32(msgspec.json.encode(prompt_ids)) < self.errors * 2**32
        return is_drawn or self.marker in prompt_ids


def fault_file(folder: Path, digest: str) -> Path:
    """Return the file with the faults of a version."""
    return folder / f"{digest.removeprefix('sha256:')}.json"


@contextmanager
def transaction_unless_broken(connection: sqlite3.Connection) -> Iterator[None]:
    """Run a transaction on rollouts in control's journal, unless the journal is to be broken."""
    if Path(os.environ[FAULTS], BROKEN_JOURNAL).exists():
        raise sqlite3.OperationalError("disk I/O error")
    with transaction(connection):
        yield


class FaultyEngine(TimedEngine):
    """A timed engine with the faults of its version.

    Args:
      loaded: the model.
      cores: see LocalEngine.
    """

    path = Path()
    """File of the version's faults: there is one version in each process."""

    def __init__(self, loaded: Engine, cores: Any = None) -> None:  # noqa: ANN401 (see LocalEngine)
        super().__init__(loaded, cores, cost=COST, tokens=only_token)
        self._fault = DeviceFault()
        self._changed_at = 0

    def step(self, rows: Sequence[StepRow]) -> list[Sampled | None]:
        """Return a step's results, later or worse than those of a device without faults."""
        fault = self._current()
        if fault.is_computed:
            return self._loaded.runner.step(rows)
        began_at = time.monotonic()
        sampled = super().step(rows)
        slow = sum(
            len(row.token_ids)
            for row in rows
            if not row.is_decode and row.start + len(row.token_ids) > fault.longer_than
        )
        took_s = (time.monotonic() - began_at) * (fault.dearer - 1.0)
        time.sleep(took_s + slow * COST.token_s * (fault.slower - 1.0))
        return [self._worse(row, one, fault) for row, one in zip(rows, sampled, strict=True)]

    def _worse(self, row: StepRow, one: Sampled | None, fault: DeviceFault) -> Sampled | None:
        if one is None or row.sample is None:
            return one
        is_failed = not row.is_decode and fault.fails(row.sample.prompt_ids)
        return Sampled(fault.token, barred=Barred.NOT_FINITE if is_failed else None)

    def _current(self) -> DeviceFault:
        """Return the faults of now."""
        try:
            changed_at = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return self._fault
        if changed_at != self._changed_at:
            self._fault = msgspec.json.decode(self.path.read_bytes(), type=DeviceFault)
            self._changed_at = changed_at
        return self._fault


def run() -> int:
    """Run as a supervisor, or as one of its processes."""
    from ops.cli import main
    from ops.control import rollout_stores
    from ops.supervisor import serve

    setattr(serve, "command_line", lambda: COMMAND)  # noqa: B010
    # In each process: control is forked from the servers' template.
    setattr(rollout_stores, "transaction", transaction_unless_broken)  # noqa: B010
    arguments = sys.argv[1:]
    if arguments[0] != Role.SERVER and SERVER_MODULES[0] not in arguments:
        # A worker, its template, or the supervisor, which forks the first template. Servers and
        # their template never load torch.
        from worker import entry

        load_engine = getattr(entry, "load_engine")  # noqa: B009 (not exported)

        def load(model_dir: Path, *given: Any, **named: Any) -> Engine:  # noqa: ANN401
            FaultyEngine.path = fault_file(Path(os.environ[FAULTS]), model_dir.name)
            loaded: Engine = load_engine(model_dir, *given, **named)
            return loaded

        setattr(entry, "load_engine", load)  # noqa: B010
        setattr(entry, "LocalEngine", FaultyEngine)  # noqa: B010
    return main(arguments)


if __name__ == "__main__":
    sys.exit(run())

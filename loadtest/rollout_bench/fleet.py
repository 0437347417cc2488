"""The fleet of the benchmark: `triolet serve` with devices that only take time; its objectives."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from ..harness.servers import TAKES_ALL, ServerProcess, running, seconds_of
from ..harness.tenants import write_tenants
from ..overload.real import ENVIRONMENT
from .candidates import FIRST, MODEL
from .device import COMMAND, FAULTS, DeviceFault, fault_file
from .traffic import TENANTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OPERATOR: Final = "operator"
OBJECTIVE: Final = """\
---
apiVersion: openslo/v1
kind: SLO
metadata: {{name: {name}, annotations: {{triolet/budget-policy: none}}}}
spec:
  service: triolet
  indicatorRef: {name}
  timeWindow: [{{duration: 30d, isRolling: true}}]
  budgetingMethod: Occurrences
  objectives: [{{{goal}}}]
"""
OPTIONS: Final = (
    *("--threads", "1", "--prefill", "4", "--decode", "1", "--max-num-seqs", "64"),
    *("--kv-pool", "64MiB", "--log-level", "info", "--dtype", "float32"),
    *("--set", "server.routing.local_prefill=off", "--set", "control.memory_bytes=8GiB"),
)


class BenchFleet:
    """The running fleet.

    Attributes:
      process: its supervisor.
      folder: folder of its files.
    """

    def __init__(self, process: ServerProcess, folder: Path) -> None:
        self.process = process
        self.folder = folder

    def break_devices(self, digest: str, fault: DeviceFault) -> None:
        """Give the devices of a version a fault from their next step on."""
        path = fault_file(self.folder / "faults", digest)
        new = path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(fault))
        new.replace(path)

    def repair_devices(self, digest: str) -> None:
        """Take the faults of a version away, for workers that start later."""
        fault_file(self.folder / "faults", digest).unlink(missing_ok=True)

    def records_of(self, digest: str, ended_at: float) -> int:
        """Return the number of requests to a version in the log, up to a Unix time."""
        ended = self.process.log.of("request_ended", model_digest=digest)
        return sum(seconds_of(entry) < ended_at for entry in ended)


@contextmanager
def bench_fleet(folder: Path, ttft_s: float | None = None) -> Iterator[BenchFleet]:
    """Run the fleet with the first version.

    Args:
      folder: folder with the store; gets logs and settings.
      ttft_s: objective for 95 % of first tokens; None for none.

    Raises:
      ServerDidNotStartError: it did not start; has the end of its log.
    """
    (folder / "faults").mkdir(exist_ok=True)
    slo = folder / "slo.yaml"
    goals = {"availability": "target: 0.99"}
    if ttft_s is not None:
        goals["first-token"] = f"op: lte, value: {ttft_s}, target: 0.95"
    slo.write_text("".join(OBJECTIVE.format(name=name, goal=goal) for name, goal in goals.items()))
    tenants = write_tenants(folder, dict.fromkeys(TENANTS, ""), OPERATOR)
    command = [
        *(*COMMAND, "serve", f"{MODEL}={MODEL}:{FIRST}", "--store", str(folder / "store")),
        *(
            "--slo",
            str(slo),
            "--tenants",
            str(tenants),
            *OPTIONS,
            *TAKES_ALL,
        ),
    ]
    own = {FAULTS: str(folder / "faults"), "XDG_STATE_HOME": str(folder / "state")}
    environment = os.environ | ENVIRONMENT | own
    with running(ServerProcess(command, folder / "fleet.log", environment)) as process:
        yield BenchFleet(process, folder)

"""`python -m tests.faults.worker ROLE …`: a worker whose device steps can be held or fail.

The very `triolet ROLE …`, with one gate before its device steps that obeys lines on stdin: a hold
point inside the computation, where no frame passes that a proxy could hold, and the two faults that
come from inside. The product itself has no such switch.

  hold N    the step after the next N waits for `go`
  raise N   the step after the next N raises
  poison N  the same, and the device takes no more work from then on, as after an error in a CUDA
            kernel: steps raise, and so does waiting for the device
  go        whatever waits goes on, and nothing is armed any more
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from functools import partial

from ops.cli import main
from simulation.timed import TimedEngine


class InjectedFaultError(Exception):
    """What a broken kernel would raise."""


class StepGate:
    """Stands before the device; steps pass on the device's thread, orders come from stdin's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._armed = ""
        self._skip = 0
        self._is_poisoned = False

    def obey(self, order: str) -> None:
        """Take an order."""
        word, _, number = order.strip().partition(" ")
        with self._changed:
            self._armed = "" if word == "go" else word
            self._skip = int(number or 0)
            self._changed.notify_all()
        _say("order_taken", order=order)

    def pass_step(self, num_rows: int) -> None:
        """Let a step pass, hold it, or raise in its place."""
        self.check_device()
        with self._changed:
            if not self._armed:
                return
            if self._skip > 0:
                self._skip -= 1
                return
            fault = self._armed
            _say("step_reached", fault=fault, rows=num_rows)
            if fault in {"raise", "poison"}:
                self._armed = ""
                self._is_poisoned = fault == "poison"
                raise InjectedFaultError("injected")
            self._changed.wait_for(lambda: not self._armed)
            _say("step_released")

    def check_device(self) -> None:
        """Raise if the device is poisoned: the error of one kernel is that of every later call."""
        if self._is_poisoned:
            raise InjectedFaultError("an illegal memory access was encountered (injected)")


def _say(event: str, **fields: object) -> None:
    # Straight to the descriptor: the product's log stream belongs to another thread.
    os.write(2, json.dumps({"event": event, **fields}).encode() + b"\n")


def _obey_stdin(gate: StepGate) -> None:
    # The process that started this worker holds the other end: it may not outlive that one.
    # Unbuffered, because a thread inside sys.stdin keeps the interpreter from ending.
    rest = b""
    while data := os.read(0, 4096):
        *orders, rest = (rest + data).split(b"\n")
        for order in orders:
            gate.obey(order.decode())
    os.kill(os.getpid(), signal.SIGKILL)


def run() -> int:
    """Put the gate in and become the worker."""
    # Imported here by its entry point, which looks the engine up by this name.
    from worker import entry

    gate = StepGate()
    setattr(entry, "LocalEngine", partial(TimedEngine, gate=gate))  # noqa: B010
    threading.Thread(target=_obey_stdin, args=(gate,), name="gate", daemon=True).start()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())

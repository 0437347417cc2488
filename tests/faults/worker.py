"""A worker for the fault matrix with device steps that can be held or made to fail (`python -m
tests.faults.worker ROLE …`).

It is `triolet ROLE …` with a gate before the device steps, controlled by lines on stdin: a hold
point inside a computation, where the proxy could hold no frame, and the two faults that come from
inside. The product has no such switch.

  hold N    the step after the next N waits for `go`
  raise N   the step after the next N raises
  poison N  the same, and the device then refuses all work, as after an error in a CUDA kernel:
            steps raise, and so does waiting for the device
  go        a waiting step continues, and all orders are cleared
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
    """A gate before the device; steps pass on the device's thread, orders come from stdin's
    thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._armed = ""
        self._skip = 0
        self._is_poisoned = False

    def obey(self, order: str) -> None:
        """Apply an order."""
        word, _, number = order.strip().partition(" ")
        with self._changed:
            self._armed = "" if word == "go" else word
            self._skip = int(number or 0)
            self._changed.notify_all()
        _say("order_taken", order=order)

    def pass_step(self, num_rows: int) -> None:
        """Pass a step, hold it, or raise instead."""
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
        """Raise if the device is poisoned: after one kernel's error every later call fails."""
        if self._is_poisoned:
            raise InjectedFaultError("an illegal memory access was encountered (injected)")


def _say(event: str, **fields: object) -> None:
    # Written to the descriptor directly: the product's log stream belongs to another thread.
    os.write(2, json.dumps({"event": event, **fields}).encode() + b"\n")


def _obey_stdin(gate: StepGate) -> None:
    # The starting process holds the other end; this worker must not outlive it. Unbuffered, because
    # a thread inside sys.stdin keeps the interpreter from exiting.
    rest = b""
    while data := os.read(0, 4096):
        *orders, rest = (rest + data).split(b"\n")
        for order in orders:
            gate.obey(order.decode())
    os.kill(os.getpid(), signal.SIGKILL)


def run() -> int:
    """Install the gate and run the worker."""
    # Imported here by its entry point, which looks up the engine by this name.
    from worker import entry

    gate = StepGate()
    setattr(entry, "LocalEngine", partial(TimedEngine, gate=gate))  # noqa: B010
    threading.Thread(target=_obey_stdin, args=(gate,), name="gate", daemon=True).start()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())

"""Runs a supervisor of fake roles as a separate process for tests, and prints the pids of the
processes that it starts."""

from __future__ import annotations

import sys

import trio

from ops.supervisor.supervisor import Supervisor, stop_on_signals
from triolet.config import SupervisorConfig

from .recording import Recorder, spec


async def main(journal: str, names: list[str]) -> None:
    supervisor = Supervisor(
        [spec(name, journal) for name in names], SupervisorConfig(), 5.0, Recorder(sys.stdout)
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(stop_on_signals, supervisor)
        await supervisor.run()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], sys.argv[2:])

"""`triolet serve`: one server and its workers on this machine, from first check to clean end.

Puts the parts together: finds out what cannot work before anything is started, runs the supervisor,
waits until requests are taken, and says so. What it looks like is the view's.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
import trio

from triolet.config import SupervisorConfig

from .exit_codes import EXIT_FAILED, CommandFailed
from .json_view import JsonView
from .plan import plan_processes
from .ports import base_url, claim_port
from .private_directory import parent_directory, private_directory
from .restart_policy import GiveUp
from .supervisor import Supervisor, stop_on_signals
from .terminal_view import TerminalView

if TYPE_CHECKING:
    from collections.abc import Callable

    from .plan import FleetPlan
    from .view import View

PROBE_TIMEOUT_S = 2.0
"""For one question to /health/ready, which is answered from memory."""
EXIT_MARGIN_S = 2.0
"""Between the server's own watchdog and ours, so that it is the server that decides."""


def serve(plan: FleetPlan) -> None:
    """Serve until a signal asks for the end.

    Raises:
      ConfigError: port or directory cannot be had; nothing was started.
      CommandFailed: a process could not be kept alive; nothing runs any more.
    """
    port = claim_port(plan.server.host, plan.server.port)
    plan = replace(plan, server=replace(plan.server, port=port))
    config = SupervisorConfig()
    with private_directory(parent_directory()) as directory:
        specs = plan_processes(plan, command_line(), directory, os.getpid(), available_cores())
        view, on_log = choose_view(plan)
        server_exit_s = plan.server.drain_timeout_s + plan.server.exit_grace_s + EXIT_MARGIN_S
        supervisor = Supervisor(specs, config, server_exit_s, view, on_log)
        with view:
            outcome = trio.run(
                run_fleet, supervisor, config, base_url(plan.server.host, port), view
            )
    if outcome is not None:
        raise CommandFailed(outcome.message, outcome.exit_code)


def choose_view(plan: FleetPlan) -> tuple[View, Callable[[str, bytes], None] | None]:
    """Return how to show the fleet, and where the log lines of its processes go."""
    if not sys.stdout.isatty():
        return JsonView(plan), None
    view = TerminalView(plan)
    # Lines between the bars would tear them; lines that go to a file do not.
    return view, view.logged if sys.stderr.isatty() else None


def command_line() -> tuple[str, ...]:
    """Return what means `triolet` in this environment, whatever the user's PATH and directory."""
    script = Path(sys.executable).with_name("triolet")
    if script.is_file():
        return (sys.executable, str(script))
    return (sys.executable, "-m", "ops.cli")


def available_cores() -> int:
    """Return the cores that this process may use, which a container may have cut down."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


async def run_fleet(
    supervisor: Supervisor, config: SupervisorConfig, url: str, view: View
) -> GiveUp | None:
    """Run a fleet and say when it takes requests; return why it had to end, if it had to."""
    async with trio.open_nursery() as nursery:
        await nursery.start(stop_on_signals, supervisor)
        nursery.start_soon(_announce, supervisor, config, url, view)
        outcome = await supervisor.run()
        nursery.cancel_scope.cancel()
    return outcome


async def _announce(supervisor: Supervisor, config: SupervisorConfig, url: str, view: View) -> None:
    """Wait until requests are taken and say so; end the fleet if that does not come."""
    await supervisor.wait_all_ready()
    state = "it did not answer"
    async with httpx2.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as client:
        with trio.move_on_after(config.ready_timeout_s):
            while True:
                try:
                    answer = await client.get(f"{url}/health/ready")
                    if answer.is_success:
                        view.serving(url)
                        return
                    state = f"{answer.status_code} {answer.text[:200]}"
                except httpx2.TransportError as error:
                    state = str(error) or type(error).__name__
                await trio.sleep(config.ready_poll_s)
    supervisor.fail(
        GiveUp(
            f"all processes are up, but {url}/health/ready is not ready after "
            f"{config.ready_timeout_s:.0f} s: {state}; see the server's log lines",
            EXIT_FAILED,
        )
    )

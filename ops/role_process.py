"""Runs a role (server, prefill, decode, control) as this process, standalone or supervised."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from triolet.errors import ConfigError
from triolet.plain_text import one_line
from triolet.private_files import keep_private
from triolet.status import ProcessFailed, report

from .exit_codes import EXIT_BAD_INPUT, CommandFailed
from .logs import configure_logs
from .own_process import hold_on_to, show_name, spin_briefly

if TYPE_CHECKING:
    from collections.abc import Callable

    from triolet.config import ProcessConfig


def run_role(
    role: str,
    process: str,
    settings: ProcessConfig,
    run: Callable[[], None],
) -> None:
    """Run a role until it ends.

    Args:
      role: name for process lists.
      process: name in its log.
      settings: settings of the process.
      run: runs the role.

    Raises:
      ConfigError: a setting is invalid (standalone).
      CommandFailed: the role cannot go on (standalone).
      typer.Exit: a setting is invalid (supervised); the error was reported to the supervisor.
    """
    keep_private()
    configure_logs(settings.log_level, process)
    show_name(f"triolet {role}")
    spin_briefly()
    if settings.supervisor_pid is not None:
        hold_on_to(settings.supervisor_pid)
    problem: BaseException | None = None
    try:
        run()
    except* (ConfigError, CommandFailed) as group:
        problem = group
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
    if problem is None:
        return
    if settings.supervisor_pid is None:
        raise problem
    # The supervisor prints the message after it has stopped the other processes.
    report(ProcessFailed(one_line(str(problem))))
    raise typer.Exit(EXIT_BAD_INPUT)

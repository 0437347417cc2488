"""One role as a process: by itself, or as one that belongs to a supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from triolet.errors import ConfigError
from triolet.plain_text import one_line
from triolet.private_files import keep_private
from triolet.status import ProcessFailed, report

from .exit_codes import EXIT_BAD_INPUT
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
      role: as processes are called in lists.
      process: as it calls itself in its log.
      settings: of the process.
      run: the role.

    Raises:
      ConfigError: it cannot work as it was set.
      typer.Exit: the same, where a supervisor tells it.
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
    except* ConfigError as group:
        problem = group
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
    if problem is None:
        return
    if settings.supervisor_pid is None:
        raise problem
    # The supervisor prints the one line, after it has ended the others.
    report(ProcessFailed(one_line(str(problem))))
    raise typer.Exit(EXIT_BAD_INPUT)

"""One role as a process: by itself, or as one that belongs to a supervisor.

Knows what every role's process has in common, and how a setting that cannot work is told; refuses
to know any role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from triolet.errors import ConfigError
from triolet.private_files import keep_private
from triolet.status import Failed, report

from .exit_codes import EXIT_BAD_INPUT
from .lifeline import hold_on_to, show_name
from .logs import configure_logs
from .plain_text import one_line
from .spinning import spin_briefly

if TYPE_CHECKING:
    from collections.abc import Callable


def run_role(
    role: str,
    process: str,
    log_level: str | None,
    supervisor_pid: int | None,
    run: Callable[[], None],
) -> None:
    """Run a role until it ends.

    Args:
      role: as processes are called in lists.
      process: as it calls itself in its log.
      log_level: None for the usual one.
      supervisor_pid: of whom it ends with; None if it belongs to nobody.
      run: the role.

    Raises:
      ConfigError: it cannot work as it was set.
      typer.Exit: the same, where a supervisor tells it.
    """
    keep_private()
    configure_logs(log_level, process)
    show_name(f"triolet {role}")
    spin_briefly()
    if supervisor_pid is not None:
        hold_on_to(supervisor_pid)
    problem: BaseException | None = None
    try:
        run()
    except* ConfigError as group:
        problem = group
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
    if problem is None:
        return
    if supervisor_pid is None:
        raise problem
    # The supervisor prints the one line, after it has ended the others.
    report(Failed(one_line(str(problem))))
    raise typer.Exit(EXIT_BAD_INPUT)

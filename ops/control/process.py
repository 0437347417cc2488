"""Entry point of the control process: opens the journal and sockets, and runs until a signal.

Without models in its settings it has no supervisor, and moves routes of servers on several hosts.
"""

from __future__ import annotations

import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from transport.address import TcpAddress, parse_address
from transport.control_protocol import ADMIN_SOCKET
from transport.zmq_network import ZmqNetwork
from triolet.status import ControlReady, report

from ..exit_codes import CommandFailed
from ..private_directory import parent_directory, private_directory
from ..running_fleets import SUPERVISOR_SOCKET, Note, home, write_note
from ..supervisor.supervisor_socket import ask_models
from .admin import serve_admin
from .control import SUPERVISOR, Control, new_id, wall
from .controller import Controller
from .journal import opened_journal
from .memory import budget_bytes, expected_bytes
from .operations import CHANGES

if TYPE_CHECKING:
    from triolet.config import ControlConfig

    from ..supervisor.supervisor_socket import ModelsAnswer

log = structlog.get_logger(__name__)


async def _first_listed(supervisor: Path) -> ModelsAnswer | None:
    """Return the supervisor's models at the start of control, or None if it does not answer."""
    try:
        return await ask_models(supervisor)
    except CommandFailed as error:
        log.warning("control_in_trouble", part=SUPERVISOR, reason=str(error))
        return None


async def run_control(
    config: ControlConfig, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Run control until cancelled.

    Args:
      config: config of the fleet.
      task_status: started once it listens for servers and commands.

    Raises:
      ConfigError: the journal or a socket cannot be opened, or the budget is unknown.
      CommandFailed: another control has taken over.
    """
    folder = Path(config.directory)
    supervisor = folder / SUPERVISOR_SOCKET
    is_alone = not config.models
    with (
        opened_journal(Path(config.state_dir or folder)) as journal,
        closing(ZmqNetwork(config.link, config.curve_dir)) as network,
    ):
        listed = None if is_alone else await _first_listed(supervisor)
        known = [] if listed is None else listed.models
        if listed is not None and listed.configs:  # models may have been added or dropped since
            config = replace(config, models=tuple(listed.configs))
        past = journal.past({one.name: one.digest for one in config.models})
        changes = [one for one in past.unfinished if one.wanted in CHANGES]
        past = past._replace(unfinished=[one for one in past.unfinished if one not in changes])
        pids = [w.pid for model in known for w in model.workers if w.pid is not None]
        budget = budget_bytes(config, pids)
        guesses = {one.name: expected_bytes(one) for one in config.models}
        now = trio.current_time()
        controller = Controller(config, budget, guesses, past, new_id, now)
        fence = int(1000 * wall()) if is_alone else 0
        async with trio.open_nursery() as nursery:
            control = Control(config, journal, controller, supervisor, nursery, fence)
            for operation in changes:
                control.changes.begin(operation)
            await nursery.start(control.rollouts.take_up)
            await control.look()
            await nursery.start(control.channel.run, network)
            control.changes.steps.note_listening()
            await nursery.start(serve_admin, control, folder / ADMIN_SOCKET, config.admin_port)
            log.info("control_started", budget_bytes=budget, models=list(controller.models))
            task_status.started()
            try:
                await control.run()
            finally:
                control.write_account()


def main(config: ControlConfig) -> None:
    """Run the process until SIGTERM or SIGINT.

    Raises:
      ConfigError: see `run_control`.
    """
    trio.run(_run_until_signal, config)


def run_alone(config: ControlConfig) -> None:
    """Run the process without a supervisor. `triolet model` on this host finds it like a fleet.

    Raises:
      ConfigError: see `run_control`.
      CommandFailed: see `run_control`.
    """
    place = parse_address(config.address)
    port = place.port if isinstance(place, TcpAddress) else 0
    with private_directory(parent_directory()) as folder:
        write_note(folder, Note(port, home=home(), is_control=True))
        main(replace(config, directory=str(folder)))


async def _run_until_signal(config: ControlConfig) -> None:
    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            await nursery.start(run_control, config)
            report(ControlReady(str(Path(config.directory) / ADMIN_SOCKET)))
            async for number in signals:
                log.info("signal", name=signal.Signals(number).name)
                nursery.cancel_scope.cancel()
                return

"""`triolet serve`: runs a fleet on this machine, from binding the port to the clean shutdown.

Opens the sockets, plans the processes, runs the supervisor, and announces when the fleet accepts
requests. Output is left to a view (terminal_view.py or json_view.py).
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog
import trio

from triolet.config import Pinning
from triolet.errors import ConfigError
from triolet.ids import Role

from ..exit_codes import EXIT_FAILED, CommandFailed
from ..ports import base_url, bind_door, bind_ports
from ..private_directory import parent_directory, private_directory
from ..running_fleets import SUPERVISOR_SOCKET, Note, home, write_note
from ..settings.form import of_role
from .adapter_set import AdapterSet
from .commands import Commands
from .json_view import JsonView
from .model_set import ModelSet
from .plan import Door, control_address, door_path, plan_processes
from .readiness import LIVE_PATH, PATH, Readiness
from .restart_policy import GiveUp
from .scaling import MEMBERS, Scaling
from .supervisor import Supervisor, running_models, stop_on_signals
from .supervisor_socket import answer_commands
from .terminal_view import TerminalView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config import ServerConfig, SupervisorConfig

    from ..models.several import StoredModels
    from .plan import FleetPlan
    from .process_spec import ProcessSpec
    from .starter import Starter
    from .view import View

NOTIFY_VARIABLE: Final = "NOTIFY_SOCKET"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

log = structlog.get_logger(__name__)

EXIT_MARGIN_S = 2.0
"""Margin by which the supervisor's timeout exceeds the server's own, so that the latter acts first.
"""


def serve(plan: FleetPlan, starter: Starter, stored: StoredModels) -> None:
    """Serve until a signal stops the fleet.

    Args:
      plan: the fleet.
      starter: starts its processes.
      stored: protects its models in the store from garbage collection.

    Raises:
      ConfigError: the port or the directory cannot be used; nothing was started.
      CommandFailed: a process could not be kept alive; everything has been stopped.
    """
    fleet, config = plan.settings.fleet, plan.settings.supervisor
    server = plan.settings.server
    if fleet.pin is not Pinning.OFF and sys.platform != "linux":
        raise ConfigError(f"fleet.pin is {fleet.pin.value!r}; allowed on this system: off")
    with ExitStack() as held:
        place = _take_place(plan, held)
        directory, port = place.directory, place.port
        members_file = str(directory / MEMBERS)
        settings = of_role(plan.settings, Role.SERVER, port=port, members_file=members_file)
        plan = replace(plan, settings=settings)

        def planned(plan: FleetPlan) -> tuple[list[ProcessSpec], list[ProcessSpec]]:
            cores = available_cores()
            return plan_processes(plan, command_line(), directory, os.getpid(), cores, place.doors)

        specs, spares = planned(plan)
        log_choices(plan)
        view, on_log = choose_view(plan)
        supervisor = Supervisor(
            specs,
            config,
            server_exit_s(server),
            view,
            on_log,
            spares=spares,
            stopped=[model.name for model in plan.models if not model.starts],
            worker_drain_s=plan.worker_drain_s,
            starter=starter,
        )
        note = _note(plan, directory, port)
        write_note(directory, note)
        scaling = Scaling(plan, note, directory, planned)
        commands = _commands(supervisor, scaling, stored)
        with view:
            outcome = trio.run(
                run_fleet,
                supervisor,
                config,
                note.url,
                view,
                directory / SUPERVISOR_SOCKET,
                place.own_paths,
                starter,
                commands,
            )
    if outcome is not None:
        raise CommandFailed(outcome.message, outcome.exit_code)


def _note(plan: FleetPlan, directory: Path, port: int) -> Note:
    """Return the note from which commands learn about the fleet."""
    url = base_url(plan.settings.server.host, port)
    addresses = {one.name: control_address(directory, one) for one in plan.workers}
    return Note(port, url, addresses, plan.model_names, os.getpid(), home())


def _commands(supervisor: Supervisor, scaling: Scaling, stored: StoredModels) -> Commands:
    models = ModelSet(supervisor, scaling, stored)
    adapters = AdapterSet(supervisor, scaling, stored, models.changing)
    return Commands(supervisor, scaling, models, adapters)


class _Place(NamedTuple):
    """Directory and sockets that a fleet holds for its whole life.

    Attributes:
      directory: private directory.
      port: port for clients.
      own_paths: Unix socket of each server if there are several.
      doors: listening sockets of each server.
    """

    directory: Path
    port: int
    own_paths: list[Path]
    doors: list[Door]


def _take_place(plan: FleetPlan, held: ExitStack) -> _Place:
    """Open the port and the directory until `held` is closed.

    Raises:
      ConfigError: one of them cannot be used.
    """
    server, servers = plan.settings.server, plan.settings.fleet.servers
    bound = bind_ports(server.host, server.port, servers)
    for one in bound:
        held.enter_context(one)
    directory = held.enter_context(private_directory(parent_directory()))
    own_paths = [door_path(directory, name) for name in plan.server_names if servers > 1]
    own = [held.enter_context(bind_door(path)) for path in own_paths]
    doors = [
        Door(one.fileno(), None if each is None else each.fileno())
        for one, each in zip_longest(bound, own)
    ]
    return _Place(directory, bound[0].getsockname()[1], own_paths, doors)


def log_choices(plan: FleetPlan) -> None:
    """Log the engine settings chosen for each model and worker role."""
    for model in plan.models:
        about = {"model": model.name} if model.name else {}
        for role, dtype in model.dtypes.items():
            engine = model.settings.worker(role).engine
            log.info(
                "engine_chosen",
                **about,
                role=role.value,
                device=engine.device,
                dtype=dtype.value,
                kv_pool_bytes=engine.kv_pool_bytes or "sized by the worker on its GPU",
            )


def server_exit_s(server: ServerConfig) -> float:
    """Return the maximum time of a server from SIGTERM to its exit [s]."""
    return server.handover_s + server.drain_timeout_s + server.exit_grace_s + EXIT_MARGIN_S


def choose_view(plan: FleetPlan) -> tuple[View, Callable[[str, bytes], None] | None]:
    """Return the view, and the handler of processes' log lines (None: they inherit stderr)."""
    if not sys.stdout.isatty():
        return JsonView(plan), None
    view = TerminalView(plan)
    # Log lines on the terminal would break the progress bars, so the view prints them.
    return view, view.logged if sys.stderr.isatty() else None


def tell_service_manager(*states: str) -> None:
    """Send states to systemd as sd_notify(3) does: one datagram to the Unix socket $NOTIFY_SOCKET.
    Does nothing if the variable is not set. Never blocks; logs a warning on failure.

    Args:
      states: assignments such as `READY=1`.
    """
    address = os.environ.get(NOTIFY_VARIABLE, "")
    if not address:
        return
    # A leading @ means the abstract namespace, where names begin with a zero byte.
    name = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.setblocking(False)
            sender.sendto("\n".join(states).encode(), name)
    except OSError as error:
        log.warning("notify_failed", address=address, states=states, reason=str(error))


def command_line() -> tuple[str, ...]:
    """Return the command that runs `triolet`, independent of PATH and working directory."""
    script = Path(sys.executable).with_name("triolet")
    if script.is_file():
        return (sys.executable, str(script))
    return (sys.executable, "-P", "-m", "triolet.entry")


def available_cores() -> list[int]:
    """Return the cores that this process may use; a container may restrict them."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


async def run_fleet(
    supervisor: Supervisor,
    config: SupervisorConfig,
    url: str,
    view: View,
    socket_path: Path | None = None,
    own_paths: Sequence[Path] = (),
    starter: Starter | None = None,
    commands: Commands | None = None,
) -> GiveUp | None:
    """Run a fleet and announce when it accepts requests. Return why it failed, or None.

    Args:
      supervisor: supervisor of the processes.
      config: timeouts.
      url: address of the server.
      view: shows the fleet.
      socket_path: Unix socket for commands, or None.
      own_paths: Unix socket of each server if there are several.
      starter: starts the processes; None to spawn each.
      commands: executes commands, or None.
    """
    readiness = partial(Readiness, url, own_paths)
    async with trio.open_nursery() as nursery:
        await nursery.start(stop_on_signals, supervisor)
        if starter is not None and starter.has_templates:
            nursery.start_soon(starter.reap_strays)
        nursery.start_soon(view.run)
        nursery.start_soon(_tell_of_the_end, supervisor)
        nursery.start_soon(_announce, supervisor, config, url, readiness, view)
        if socket_path is not None and commands is not None:
            command = partial(commands.obey, readiness)
            await nursery.start(answer_commands, socket_path, command)
        outcome = await supervisor.run()
        nursery.cancel_scope.cancel()
    return outcome


async def _tell_of_the_end(supervisor: Supervisor) -> None:
    await supervisor.stopping.wait()
    tell_service_manager(STOPPING, "STATUS=Shutting down")


async def _announce(
    supervisor: Supervisor,
    config: SupervisorConfig,
    url: str,
    readiness: Callable[[], Readiness],
    view: View,
) -> None:
    """Announce when the fleet accepts requests; fail the fleet if it does not in time."""
    await supervisor.wait_all_ready()
    async with readiness() as servers:
        state = await _last_objection(servers, supervisor, config)
    if supervisor.stopping.is_set():
        return
    if state is None:
        view.serving(url)
        tell_service_manager(READY, f"STATUS=Serving at {url}")
        return
    supervisor.fail(
        GiveUp(
            f"all processes run, but {url}/health/ready reports not ready after "
            f"{config.ready_timeout_s:.0f} s: {state}; see the server's log lines",
            EXIT_FAILED,
        )
    )


async def _last_objection(
    servers: Readiness, supervisor: Supervisor, config: SupervisorConfig
) -> str | None:
    """Wait until the servers serve every model that has running workers. After `ready_timeout_s`
    one served model is enough. Return why they are not ready, or None if they are."""
    with trio.move_on_after(config.ready_timeout_s):
        while not supervisor.stopping.is_set():
            running = running_models(supervisor)
            if await servers.objection(PATH if running else LIVE_PATH, running) is None:
                return None
            await trio.sleep(config.ready_poll_s)
    # One model that is not served must not stop a fleet that serves others.
    return await servers.objection(PATH if running_models(supervisor) else LIVE_PATH)

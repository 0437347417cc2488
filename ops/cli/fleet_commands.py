"""`triolet drain` and `restart`: commands to a running fleet.

`drain` speaks the worker protocol; `restart` asks the supervisor through its socket.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING

import trio
import typer

from transport.frames import Drain, Goodbye, Welcome, WorkerHeartbeat
from transport.handshake import agree_version, goodbye, make_hello
from transport.link import PeerBusy, PeerGone
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.errors import ConfigError
from triolet.ids import PeerId, Role, new_epoch

from ..audit.events import Action
from ..audit.recording import recorded
from ..chosen_fleet import fleet_to_change
from ..exit_codes import CommandFailed
from ..supervisor.plan import SERVER_NAME
from ..supervisor.rolling import ORDER
from ..supervisor.supervisor_socket import RestartRequest, ask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from transport.frames import AnyFrame, Load
    from transport.link import Connection, Network

    from ..supervisor.supervisor_socket import Request


LEAVE_MARGIN_S = 10.0
"""Wait beyond the deadline: for the running step, the last frames, and a busy machine."""
SILENCE_S = 5.0
"""Ten heartbeats, longer than servers wait: a busy machine may pause a worker for a moment, and
giving up here would leave it draining unattended."""


def run_drain(
    target: str, deadline_s: float, keys: Path | None, port: int | None, audit: Path | None
) -> None:
    """Drain a worker and print its progress.

    Args:
      target: control address of a worker, or name of a worker of a local fleet.
      deadline_s: seconds after which unfinished requests move to other workers.
      keys: key directory, for tcp addresses.
      port: port of the local fleet, if several run.
      audit: directory of the audit log; None for this user's.

    Raises:
      ConfigError: no such worker, or it is not clear in which fleet.
      CommandFailed: the worker was not drained.
      AuditLogError: the command could not be recorded and was not started.
    """
    is_address = "://" in target
    address = target if is_address else address_of(target, port)
    folder = None if keys is None else str(keys)
    with (
        closing(ZmqNetwork(LinkConfig(), folder)) as network,
        recorded(Action.WORKER_DRAIN, target, folder=audit),
    ):
        name = trio.run(drain_worker, network, address, deadline_s, typer.echo)
    if is_address:
        typer.echo(f"{name} has exited; start it again where it ran, if it is still needed")
    else:
        typer.echo(f"{name} has exited; its supervisor starts a new one")


def address_of(name: str, port: int | None) -> str:
    """Return the control address of a worker of a local fleet.

    Raises:
      ConfigError: no worker has this name, or it is not clear in which fleet.
      CommandFailed: no fleet runs.
    """
    note = fleet_to_change(port).note
    if name in note.workers:
        return note.workers[name]
    if name.startswith(SERVER_NAME):
        raise ConfigError(
            "SIGTERM drains a server; use `triolet restart --role server` to replace servers while "
            "the fleet serves"
        )
    raise ConfigError(
        f"the fleet on port {note.port} has no worker {name!r}; allowed: "
        f"{', '.join(note.workers)}, or a control address"
    )


async def drain_worker(
    network: Network, address: str, deadline_s: float, show: Callable[[str], object]
) -> str:
    """Drain a worker. Return its name once it has exited.

    Args:
      network: network for the connection.
      address: control address of the worker.
      deadline_s: seconds after which unfinished requests move to other workers.
      show: called with a sentence at each change.

    Raises:
      ConfigError: the address is invalid.
      CommandFailed: the worker does not answer, refuses, or exits before it was drained.
    """
    link = LinkConfig()
    me = PeerId(Role.OPERATOR, "operator", new_epoch())
    bounds = {"hwm": link.control_hwm, "max_frame_bytes": link.max_control_frame_bytes}
    with closing(network.connect(address, me.identity(), **bounds)) as connection:
        worker = await _greet(connection, me, address, link)
        until = trio.current_time() + deadline_s
        shown = ""
        with trio.move_on_after(deadline_s + LEAVE_MARGIN_S):
            while True:
                left_s = max(0.0, until - trio.current_time())
                # Repeat with each heartbeat; this also keeps the connection alive.
                _say(connection, Drain(left_s), worker)
                for frame in await _hear(connection, worker):
                    if isinstance(frame, Goodbye):
                        # The worker waits for this acknowledgement.
                        _say(connection, goodbye("heard"), worker)
                        return worker
                    if isinstance(frame, WorkerHeartbeat) and frame.is_draining:
                        words = f"{worker}: {what_is_left(frame.load)}"
                        if words != shown:
                            show(f"{words}; the rest moves to other workers in {left_s:.0f} s")
                        shown = words
        raise CommandFailed(
            f"{worker} has not exited {LEAVE_MARGIN_S:.0f} s after the deadline; its log says why. "
            "SIGKILL is safe: its requests continue on other workers"
        )


async def _greet(connection: Connection, me: PeerId, address: str, link: LinkConfig) -> str:
    with trio.move_on_after(link.hello_timeout_s):
        await connection.send(make_hello(me))
        while True:
            for message in await connection.receive_many():
                match message.frame:
                    case Welcome(peer=peer, version=version):
                        if agree_version(version, version) is None:
                            raise CommandFailed(
                                f"{peer.name} speaks protocol version {version}; use the "
                                "`triolet` of its release"
                            )
                        return peer.name
                    case Goodbye(reason=reason):
                        raise CommandFailed(f"the worker at {address} refuses: {reason}")
    if connection.trouble:
        raise CommandFailed(f"the worker at {address} {connection.trouble}")
    raise CommandFailed(
        f"no worker answers at {address} within {link.hello_timeout_s:g} s: check the address"
    )


async def _hear(connection: Connection, worker: str) -> list[AnyFrame]:
    with trio.move_on_after(SILENCE_S):
        return [message.frame for message in await connection.receive_many()]
    raise CommandFailed(
        f"{worker} stopped answering before it was drained; its requests continue elsewhere"
    )


def _say(connection: Connection, frame: AnyFrame, worker: str) -> None:
    try:
        connection.send_nowait(frame)
    except (PeerGone, PeerBusy) as error:
        raise CommandFailed(
            f"{worker} exited before it was drained; its requests continue elsewhere"
        ) from error


def what_is_left(load: Load) -> str:
    """Return how many sequences a worker still has, as text."""
    left = load.running + load.paused + load.waiting
    return f"{left} sequence{'' if left == 1 else 's'} left"


def run_restart(
    models: Sequence[str], roles: Sequence[str], port: int | None, audit: Path | None
) -> None:
    """Restart every process of some roles and print each step.

    Args:
      models: restart only the workers of these models; empty for all processes.
      roles: roles to restart; empty for all.
      port: port of the local fleet, if several run.
      audit: directory of the audit log; None for this user's.

    Raises:
      ConfigError: a role is unknown or is not a worker of a model, or several fleets run and no
        port is given.
      CommandFailed: no fleet runs, or the restart did not complete.
      AuditLogError: the command could not be recorded and was not started.
    """
    for role in roles:
        if role not in ORDER:
            raise ConfigError(f"--role is {role!r}; allowed: {', '.join(sorted(ORDER))}")
        if models and role not in (Role.PREFILL, Role.DECODE):
            raise ConfigError(
                f"--role is {role!r} together with a model; allowed: prefill, decode: all models "
                f"share one {role}"
            )
    fleet = fleet_to_change(port)
    request = RestartRequest(tuple(Role(role) for role in roles), tuple(models))
    of_models = f" of {', '.join(models)}" if models else ""
    subject = f"port {fleet.note.port}: {', '.join(sorted(set(roles))) or 'all roles'}{of_models}"
    with recorded(Action.FLEET_RESTART, subject, folder=audit):
        trio.run(_show, fleet.supervisor_socket, request, f"every process{of_models} is replaced")


async def _show(path: Path, request: Request, done: str) -> None:
    began = time.monotonic()

    def show(text: str) -> None:
        typer.echo(f"{time.monotonic() - began:6.1f} s  {text}")

    await ask(path, request, show)
    show(f"done: {done}")

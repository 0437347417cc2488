"""The server process: puts the parts together, and takes them apart in order.

At the end new requests are refused, the links let what runs finish (each stream gets its terminal
event at the latest at the deadline), then connections close; a watchdog thread ends the process if
something still hangs. Before that, where a successor accepts on the same socket, new connections
are left to it, and clients of open ones are asked to connect again.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import structlog
import trio

from transport.zmq_network import ZmqNetwork
from triolet.errors import ConfigError
from triolet.process import return_large_blocks
from triolet.status import SUCCESSOR_SIGNAL, ServerReady, report
from triolet.tenants.ladders import require_models, require_tenant_ladders
from triolet.units import MIB

from .api.peers import Peers
from .api.request_scope import ServerState
from .api.served_models import ModelTable
from .api.services import Services
from .app import build_app
from .edge.listen import Edge, base_url, open_listening_socket, open_own_socket
from .fleets import Fleets, first_work, names_of
from .jobs.runner import BatchRunner
from .jobs.storage import Storage
from .metrics.metrics import Metrics
from .model_changes import ModelChanges, read_models
from .scheduling.control_link import ControlLink
from .scheduling.members import MemberFile
from .tenants.opening import opened_quotas
from .tenants.tenancy import Tenancy, TenantFile
from .tenants.usage_ledger import opened_ledger
from .text.processes import TextProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from socket import socket

    from quart_trio import QuartTrio

    from triolet.config import ServerConfig
    from triolet.tenants.plans import Prices, Tenants

    from .tenants.quotas import Quotas
    from .tenants.usage_ledger import UsageLedger

log = structlog.get_logger(__name__)

LARGE_BYTES: Final = MIB
"""Blocks from here on go back to the system when they are freed: bodies, and what is made of them.
Streams need none, so nothing frequent pays for it; a siege with bodies of 16 MiB leaves 6 MiB
instead of 50."""
GC_THRESHOLDS: Final = (20_000, 50, 1000)
"""Streams make few cycles and many objects: collecting as often as the default costs more than it
finds, and a full collection over a large heap pauses every stream at once. The first bounds the
shortest pause: a young collection takes 10 ms where 100,000 objects of a conversation are alive."""
SWITCH_S: Final = 0.001
"""After which a thread that computes lets the event loop go on. Python's default is five times
that, and the loop asks anew after each call of the system: beside one large body, it would make
some hundred steps a second."""
CLOSE_SHARE: Final = 0.5
"""Of the grace after the drain: for writing what is left. The rest is for leaving."""
SPEND_SUFFIX: Final = ".spend.sqlite3"
"""Beside the file of tenants."""
EXIT_FORCED: Final = 75
"""EX_TEMPFAIL of sysexits: told apart from a crash and from a bad configuration."""


async def serve(
    config: ServerConfig,
    state: ServerState | None = None,
    on_drained: Callable[[], None] | None = None,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `state` says to drain, and what runs then has ended.

    Args:
      state: how the caller says that it is enough; None to serve until cancelled.
      on_drained: called once nothing runs any more, before connections are closed.
      task_status: started with the address once connections are accepted, with workers or not.

    Raises:
      ConfigError: the model, an address, the port, a directory or the tenants cannot be used.
    """
    _require_ladder(config)
    with ExitStack() as sockets:
        listening = _listen(config, sockets)
        processes = TextProcesses(config)
        config, files, left_out, routes = read_models(config, processes.do)
        network = ZmqNetwork(config.link, config.curve_dir)
        try:
            metrics = _metrics(config)
            names = {name: (name,) for name in routes} | names_of(config)
            tenancy, tenant_file = _tenancy(config, metrics, names, left_out)
            peers = Peers(config.peers) if config.peers else None
            quotas, ledger = sockets.enter_context(_accounts(config, metrics, tenancy, names))
            fleets = Fleets(config, network, metrics, quotas, names, processes.do, ledger)
            processes.first = first_work(models := fleets.add_all(config, files))
            services = Services(
                config,
                ModelTable(models, routes),
                metrics,
                state or ServerState(),
                count_connections=lambda: edge.connections,
                peers=peers,
                do=processes.do,
                tenancy=tenancy,
                quotas=quotas,
            )
            storage = sockets.enter_context(_storage(config))
            edge = Edge(app := build_app(services, storage), config)
            _show(metrics, fleets, edge, services, processes)
            async with trio.open_nursery() as nursery:
                for run in (quotas.store.run, services.kept.run, processes.run):
                    await nursery.start(run)
                changes = ModelChanges(services, fleets, nursery)
                await changes.start()
                await nursery.start(edge.run, *listening)
                task_status.started(base_url(listening[0]))
                nursery.start_soon(_hand_over, services.state, edge, config.handover_s)
                nursery.start_soon(_run_beside, services, app, storage, fleets, tenant_file)
                nursery.start_soon(_follow, config, fleets, changes)
                await services.state.draining.wait()
                await _drain(fleets, peers, edge, config, on_drained)
                nursery.cancel_scope.cancel()
        finally:
            network.close()


def _require_ladder(config: ServerConfig) -> None:
    """Raise ConfigError for a ladder of models that are not served."""
    each = config.of_models
    aliases = [alias for one in each for alias in one.model_aliases]
    require_models(config.auto, [one.model_name for one in each], aliases)


def _metrics(config: ServerConfig) -> Metrics:
    digests = {one.model_name: one.model_digest for one in config.of_models}
    first, *others = digests
    return Metrics(first, config.metrics_compat, *others, digests=digests)


def _show(
    metrics: Metrics, fleets: Fleets, edge: Edge, services: Services, processes: TextProcesses
) -> None:
    """Let the metrics show what there is of everything."""
    first, *others = fleets.by_model.items()
    metrics.watch(
        first[1].status, *edge.counters, others={name: fleet.status for name, fleet in others}
    )
    metrics.versions.watch(
        lambda: {
            name: one.admission.presence.worker_seconds for name, one in fleets.by_model.items()
        }
    )
    bodies = services.bodies
    metrics.http.watch_door(processes.turns, lambda: bodies.held_bytes, bodies.refused)


async def _drain(
    fleets: Fleets,
    peers: Peers | None,
    edge: Edge,
    config: ServerConfig,
    on_drained: Callable[[], None] | None,
) -> None:
    """Let what runs here finish, and what runs elsewhere for clients that are connected here; then
    close connections."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleets.drain)
        if peers is not None:
            nursery.start_soon(peers.drain, config.drain_timeout_s)
    if on_drained is not None:
        on_drained()
    edge.stop(within_s=CLOSE_SHARE * config.exit_grace_s)
    await edge.wait_closed()


def _listen(config: ServerConfig, sockets: ExitStack) -> list[socket]:
    """Open the sockets for clients, and for peers where there are any."""
    listening = [sockets.enter_context(open_listening_socket(config))]
    if config.peers is not None:
        listening.append(sockets.enter_context(open_own_socket(config.peers)))
    return listening


@contextmanager
def _accounts(
    config: ServerConfig, metrics: Metrics, tenancy: Tenancy, names: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[Quotas, UsageLedger | None]]:
    """Open the accounts of tenants, which servers on one port share as well as they can, and the
    usage ledger where it is kept.

    Args:
      config: of the server.
      metrics: are told.
      tenancy: the tenants.
      names: of each model with its aliases, by its name.
    """
    tenants, quotas = config.tenants, config.tenants.quotas
    if config.peers is not None:
        quotas = replace(quotas, servers=max(quotas.servers, len(config.peers.paths)))
    if tenants.file is not None and quotas.spend_file is None and not quotas.is_shared:
        quotas = replace(quotas, spend_file=tenants.file + SPEND_SUFFIX)

    def prices_of(model: str) -> Prices:
        # The last charges of a model may come after it was removed.
        return tenancy.prices_of(*names.get(model, (model,)))

    with (
        opened_quotas(quotas, metrics.quotas, prices_of) as opened,
        opened_ledger(config.usage) as ledger,
    ):
        metrics.quotas.watch(opened)
        if ledger is not None:
            metrics.usage_dropped = lambda: ledger.dropped
        yield opened, ledger


@contextmanager
def _storage(config: ServerConfig) -> Iterator[Storage | None]:
    """Open files and batches where they are kept; close them in the end."""
    if config.batches.directory is None:
        yield None
        return
    storage = Storage(config.batches.directory, config.batches, secrets.token_hex(8))
    try:
        yield storage
    finally:
        storage.close()


def _tenancy(
    config: ServerConfig, metrics: Metrics, models: Collection[str], left_out: Collection[str]
) -> tuple[Tenancy, TenantFile | None]:
    """Return the tenants, and the file that may change them.

    Args:
      config: of the server.
      metrics: are told.
      models: names of those that there are.
      left_out: names of those that could not be read.
    """
    tenant_file = None
    tenancy = Tenancy()
    if config.tenants.file is not None:

        def check(tenants: Tenants, file: str) -> None:
            require_tenant_ladders(tenants, config.auto, models, file)

        tenant_file = TenantFile(config.tenants.file, config.tenants, check)
        tenancy = tenant_file.open(left_out)
    metrics.tenants.watch(lambda: tenancy.report)
    return tenancy, tenant_file


async def _run_beside(
    services: Services,
    app: QuartTrio,
    storage: Storage | None,
    fleets: Fleets,
    tenant_file: TenantFile | None,
) -> None:
    """Do what no client waits for: batches, and looking for other tenants."""
    async with trio.open_nursery() as nursery:
        if storage is not None:
            nursery.start_soon(_run_batches, services, app, storage, fleets)
        nursery.start_soon(services.recent.run)
        if tenant_file is not None:
            nursery.start_soon(tenant_file.run, services.tenancy, fleets.cancel_tenants)


async def _follow(config: ServerConfig, fleets: Fleets, changes: ModelChanges) -> None:
    """Follow the file of members, and tell control of the models, where there are these."""
    async with trio.open_nursery() as nursery:
        if config.control_socket is not None:
            changes.link = ControlLink(
                config.control_socket, fleets.own_name, fleets.by_model, changes.refused
            )
            nursery.start_soon(changes.link.run)
        if config.members_file is not None:
            file = MemberFile(config.members_file, config.members_poll_s)
            nursery.start_soon(file.run, changes.use)


async def _run_batches(
    services: Services, app: QuartTrio, storage: Storage, fleets: Fleets
) -> None:
    """Run batches until this process is about to leave; a successor goes on with them."""
    config, on_line = services.config, services.metrics.http.batch_line
    runner = BatchRunner(storage, config.batches, app, config.host, fleets.hold_s, on_line)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        await services.state.leaving.wait()
        nursery.cancel_scope.cancel()


async def _hand_over(state: ServerState, edge: Edge, handover_s: float) -> None:
    """Once there is a successor leave new connections to it, and a little later drain.

    Until then requests on connections that were open already are answered, with the advice to close
    them: their clients did nothing wrong, and the successor gets the next one.
    """
    await state.leaving.wait()
    if state.has_successor:
        edge.stop_accepting()
        await trio.sleep(handover_s)
        state.drain()


def main(config: ServerConfig) -> None:
    """Run the process until SIGTERM or SIGINT, and through the drain that follows.

    Raises:
      ConfigError: as `serve`.
    """
    sys.setswitchinterval(SWITCH_S)
    return_large_blocks(LARGE_BYTES)
    try:
        trio.run(_run, config)
    except BaseExceptionGroup as group:
        error: BaseException | None = group.subgroup(ConfigError)
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if error is None:
            raise
        raise error from None


async def _run(config: ServerConfig) -> None:
    state = ServerState()
    watchdog = ExitWatchdog()

    def hand_over() -> None:
        if not state.is_leaving:
            watchdog.leave_within(config.handover_s + config.drain_timeout_s + config.exit_grace_s)
            state.hand_over()

    def drain() -> None:
        watchdog.leave_within(config.drain_timeout_s + config.exit_grace_s)
        state.drain()

    def leave() -> None:
        watchdog.leave_within(config.exit_grace_s)

    async with trio.open_nursery() as nursery:
        await nursery.start(_heed_signals, hand_over, drain, nursery.cancel_scope)
        async with trio.open_nursery() as serving:
            url = await serving.start(serve, config, state, leave)
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            report(ServerReady(url))
        nursery.cancel_scope.cancel()


async def _heed_signals(
    hand_over: Callable[[], None],
    drain: Callable[[], None],
    everything: trio.CancelScope,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Drain at the first request to end, leave at the second."""
    is_draining = False
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, SUCCESSOR_SIGNAL) as signals:
        task_status.started()
        async for number in signals:
            log.info("signal", name=signal.Signals(number).name)
            if number == SUCCESSOR_SIGNAL:
                hand_over()
                continue
            if is_draining:
                everything.cancel()
                return
            is_draining = True
            drain()


class ExitWatchdog:
    """Ends the process in time, from a thread: what hangs may be the event loop itself."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def leave_within(self, seconds: float) -> None:
        """Set the time that is left, instead of what was set before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, os._exit, [EXIT_FORCED])
        self._timer.daemon = True
        self._timer.start()

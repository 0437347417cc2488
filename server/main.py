"""The server process: builds and starts all parts, and shuts them down in order.

Shutdown refuses new requests and lets running ones finish; streams get their terminal event by the
drain deadline. Then connections close, and a watchdog thread ends the process if anything hangs.
On a handover, a successor process already accepts on the same socket: new connections go to it, and
clients on open connections are asked to reconnect.
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
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog
import trio

from transport.zmq_network import ZmqNetwork
from triolet.errors import ConfigError
from triolet.process import return_large_blocks
from triolet.slo.objectives import read_objectives
from triolet.sqlite import Journal
from triolet.status import SUCCESSOR_SIGNAL, ServerReady, report
from triolet.tenants.ladders import require_models, require_tenant_ladders
from triolet.units import MIB

from .api.request_scope import ServerState
from .api.served_models import ModelTable
from .api.services import Services
from .app import build_app
from .edge.listen import Edge, base_url, open_listening_socket, open_own_socket
from .fleets import Fleets, first_work, names_of
from .jobs.runner import BatchRunner
from .jobs.storage import Storage
from .membership.members import member_source
from .metrics.metrics import Metrics
from .model_changes import ModelChanges, read_models
from .peers.peers import Peers
from .rollouts.candidates import Candidates, ServedVersion
from .rollouts.collector import RolloutCollector
from .scheduling.control_link import ControlLink
from .slo.meter import SloMeter
from .tenants.opening import opened_quotas
from .tenants.tenancy import Tenancy, TenantFile
from .tenants.usage_ledger import opened_ledger
from .text.processes import TextProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping
    from socket import socket

    from quart_trio import QuartTrio

    from transport.link import Network
    from triolet.config import ServerConfig
    from triolet.tenants.plans import Prices, Tenants

    from .peers.other_hosts import OtherHosts
    from .tenants.quotas import Quotas
    from .tenants.usage_ledger import UsageLedger

log = structlog.get_logger(__name__)

LARGE_BYTES: Final = MIB
"""Allocations of at least this many bytes return to the system when freed: bodies and what is built
from them. Streams make none, so no frequent path pays for it. A load of 16 MiB bodies leaves 6 MiB
resident instead of 50."""
GC_THRESHOLDS: Final = (20_000, 50, 1000)
"""Garbage collection thresholds. Streams create many objects but few cycles, so the default
thresholds cost more than they find, and a full collection of a large heap pauses every stream.
The first threshold bounds the shortest pause: 10 ms for 100,000 live objects."""
SWITCH_S: Final = 0.001
"""Thread switch interval: how long a computing thread keeps the interpreter from the event loop.
The default is five times longer. The loop gives up the lock at each system call, so beside one
large body it would run only about a hundred steps per second."""
CLOSE_SHARE: Final = 0.5
"""The part of the grace period that is spent writing what is left. The rest is for exiting."""
SPEND_SUFFIX: Final = ".spend.sqlite3"
"""Suffix of the usage database's path, after the tenants file's path."""
EXIT_FORCED: Final = 75
"""EX_TEMPFAIL of sysexits.h: distinguishes a restart from a crash or a bad configuration."""


async def serve(
    config: ServerConfig,
    state: ServerState | None = None,
    on_drained: Callable[[], None] | None = None,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `state` says to drain and all running requests have ended.

    Args:
      state: tells the server to hand over or drain; None to serve until cancelled.
      on_drained: called when all requests have ended, before connections close.
      task_status: started with the address once connections are accepted, even without workers.

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
            quotas, ledger = sockets.enter_context(_accounts(config, metrics, tenancy, names))
            fleets = Fleets(config, network, metrics, quotas, names, processes.do, ledger)
            processes.first = first_work(models := fleets.add_all(config, files))
            services = Services(
                config,
                ModelTable(models, routes),
                metrics,
                state or ServerState(),
                count_connections=lambda: edge.connections,
                peers=Peers(config.peers) if config.peers else None,
                hosts=_other_hosts(config),
                do=processes.do,
                tenancy=tenancy,
                quotas=quotas,
            )
            storage = sockets.enter_context(_storage(config))
            edge = Edge(app := build_app(services, storage), config, services.host_secret)
            _show(metrics, fleets, edge, services, processes)
            async with trio.open_nursery() as nursery:
                await _start_all(nursery, services, processes)
                changes = ModelChanges(services, fleets, nursery)
                await changes.start()
                nursery.start_soon(_follow, config, network, fleets, changes, services)
                await wait_for_news(services, changes)
                await nursery.start(edge.run, *listening)
                task_status.started(base_url(listening[0]))
                nursery.start_soon(_hand_over, services.state, edge, config.handover_s)
                nursery.start_soon(_run_beside, services, app, storage, fleets, tenant_file)
                await services.state.draining.wait()
                await _drain(fleets, services, edge, config, on_drained)
                nursery.cancel_scope.cancel()
        finally:
            network.close()


async def wait_for_news(services: Services, changes: ModelChanges) -> None:
    """Wait until control has told its routes, at most `routes.first_news_s`, if there may be a
    rollout: a public name has two versions, or only control knows which names have."""
    config = services.config
    is_split = any(len(route.shares) > 1 for route in services.models.routes.values())
    may_be = is_split or (config.members_file is None and len(services.models) > 1)
    if config.control_addresses and may_be:
        with trio.move_on_after(config.routes.first_news_s):
            await changes.heard.wait()


def _require_ladder(config: ServerConfig) -> None:
    """Raise ConfigError if a ladder names a model that is not served."""
    each = config.of_models
    aliases = [alias for one in each for alias in one.model_aliases]
    require_models(config.auto, [one.model_name for one in each], aliases)


def _metrics(config: ServerConfig) -> Metrics:
    digests = {one.model_name: one.model_digest for one in config.of_models}
    first, *others = digests
    slos = SloMeter(read_objectives(config.objectives), config.objectives, trio.current_time)
    rollouts = RolloutCollector(config.routes, slos)
    compat = config.metrics_compat
    return Metrics(first, compat, *others, digests=digests, slos=slos, rollouts=rollouts)


def _show(
    metrics: Metrics, fleets: Fleets, edge: Edge, services: Services, processes: TextProcesses
) -> None:
    """Register every part's gauges with the metrics."""
    metrics.slos.public_name = services.models.public_name_of
    first, *others = fleets.by_model.items()
    metrics.watch(
        first[1].status, *edge.counters, others={name: fleet.status for name, fleet in others}
    )
    metrics.versions.watch(
        lambda: {
            name: one.admission.presence.worker_seconds for name, one in fleets.by_model.items()
        }
    )
    metrics.route_valid_s = services.route_valid_s
    bodies = services.bodies
    metrics.http.watch_door(processes.turns, lambda: bodies.held_bytes, bodies.refused)


def _other_hosts(config: ServerConfig) -> OtherHosts | None:
    """Return the servers on other hosts; None if keys are not shared."""
    if not config.hosts.advertised_url:
        return None
    # Imported late: the library of Redis costs memory and a quarter of a second.
    from .peers.other_hosts import OtherHosts

    return OtherHosts(config)


async def _start_all(nursery: trio.Nursery, services: Services, processes: TextProcesses) -> None:
    """Start the parts that requests need."""
    for run in (services.quotas.store.run, services.kept.run, processes.run):
        await nursery.start(run)
    if services.hosts is not None:
        # Connect before the first request: until then keys are local.
        await nursery.start(services.hosts.directory.run)


async def _drain(
    fleets: Fleets,
    services: Services,
    edge: Edge,
    config: ServerConfig,
    on_drained: Callable[[], None] | None,
) -> None:
    """Let requests finish, those here and those proxied to peers for local clients; then close
    connections."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleets.drain)
        for peers in (services.peers, services.hosts):
            if peers is not None:
                nursery.start_soon(peers.answers.drain, config.drain_timeout_s)
    if on_drained is not None:
        on_drained()
    edge.stop(within_s=CLOSE_SHARE * config.exit_grace_s)
    await edge.wait_closed()


def _listen(config: ServerConfig, sockets: ExitStack) -> list[socket]:
    """Open the client sockets, and the peer socket if there are peers."""
    listening = [sockets.enter_context(open_listening_socket(config))]
    if config.peers is not None:
        listening.append(sockets.enter_context(open_own_socket(config.peers)))
    return listening


@contextmanager
def _accounts(
    config: ServerConfig, metrics: Metrics, tenancy: Tenancy, names: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[Quotas, UsageLedger | None]]:
    """Open the tenants' accounts, shared by the servers on one port as far as possible, and the
    usage ledger if enabled.

    Args:
      config: the server's settings.
      metrics: record account events.
      tenancy: the tenants.
      names: each model's name and aliases, by name.
    """
    tenants, quotas = config.tenants, config.tenants.quotas
    if config.peers is not None:
        quotas = replace(quotas, servers=max(quotas.servers, len(config.peers.paths)))
    if tenants.file is not None and quotas.spend_file is None and not quotas.is_shared:
        quotas = replace(quotas, spend_file=tenants.file + SPEND_SUFFIX)

    def prices_of(model: str) -> Prices:
        # A model's last charges may arrive after it was removed.
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
    """Open the storage of files and batches if enabled; close it on exit."""
    if config.batches.directory is None:
        yield None
        return
    # With several hosts, other machines may open the database too.
    journal = Journal.ROLLBACK if config.hosts.advertised_url else Journal.WRITE_AHEAD
    storage = Storage(config.batches.directory, config.batches, secrets.token_hex(8), journal)
    try:
        yield storage
    finally:
        storage.close()


def _tenancy(
    config: ServerConfig, metrics: Metrics, models: Collection[str], left_out: Collection[str]
) -> tuple[Tenancy, TenantFile | None]:
    """Return the tenants, and the watched file that may change them.

    Args:
      config: the server's settings.
      metrics: record reloads.
      models: names of the served models.
      left_out: names of models that could not be read.
    """
    tenant_file = None
    tenancy = Tenancy()
    if config.tenants.file is not None:

        def check(tenants: Tenants, file: str) -> None:
            require_tenant_ladders(tenants, config.auto, models, file)

        tenant_file = TenantFile(config.tenants.file, config.tenants, check)
        tenancy = tenant_file.open(left_out, config.zone)
    metrics.tenants.watch(lambda: tenancy.report)
    return tenancy, tenant_file


async def _run_beside(
    services: Services,
    app: QuartTrio,
    storage: Storage | None,
    fleets: Fleets,
    tenant_file: TenantFile | None,
) -> None:
    """Run the background work: batches, and reloading the tenants file."""
    async with trio.open_nursery() as nursery:
        if storage is not None:
            nursery.start_soon(_run_batches, services, app, storage, fleets)
        nursery.start_soon(services.history.run)
        if tenant_file is not None:
            nursery.start_soon(tenant_file.run, services.tenancy, fleets.cancel_tenants)


async def _follow(
    config: ServerConfig,
    network: Network,
    fleets: Fleets,
    changes: ModelChanges,
    services: Services,
) -> None:
    """Follow the source of members, and report the models to control, where configured."""
    async with trio.open_nursery() as nursery:
        if config.control_addresses:
            candidates = Candidates(config.candidates, partial(_find_version, services, fleets))
            nursery.start_soon(candidates.run)
            services.metrics.rollouts.tested = candidates
            changes.link = ControlLink(
                config,
                network,
                fleets.own_name,
                fleets.by_model,
                changes.refused,
                lambda: services.models.routes,
                changes.use_routes,
                services.metrics.rollouts,
            )
            nursery.start_soon(changes.link.run)
        if config.desired_redis.url:
            # Imported late: the library of Redis costs memory and a quarter of a second.
            from .membership.desired import DesiredWorkers

            desired = DesiredWorkers(config)
            services.metrics.desired = lambda: desired.numbers
            nursery.start_soon(desired.run)
        source = member_source(config, lambda: fleets.alive)
        if source is not None:
            services.metrics.membership = source.health
            nursery.start_soon(source.run, changes.use)


def _find_version(services: Services, fleets: Fleets, name: str) -> ServedVersion | None:
    found = (one for one in services.models if one.version == name)
    return next((ServedVersion(fleets.by_model[name], one.text.encode) for one in found), None)


async def _run_batches(
    services: Services, app: QuartTrio, storage: Storage, fleets: Fleets
) -> None:
    """Run batches until this process begins to leave. A successor continues them."""
    config, on_line = services.config, services.metrics.http.batch_line
    runner = BatchRunner(
        storage,
        config.batches,
        app,
        config.host,
        fleets.hold_s,
        on_line,
        services.quotas.store.wait_saved,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runner.run)
        await services.state.leaving.wait()
        nursery.cancel_scope.cancel()


async def _hand_over(state: ServerState, edge: Edge, handover_s: float) -> None:
    """Wait for a successor, stop accepting connections, and drain a little later.

    Until the drain, requests on open connections are answered with `connection: close`: their
    clients did nothing wrong, and their next request reaches the successor.
    """
    await state.leaving.wait()
    if state.has_successor:
        edge.stop_accepting()
        await trio.sleep(handover_s)
        state.drain()


def main(config: ServerConfig) -> None:
    """Run the process until SIGTERM or SIGINT and the drain that follows.

    Raises:
      ConfigError: see `serve`.
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
    """Drain at the first signal, exit at the second."""
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
    """Ends the process on time, from a thread, since the event loop itself may hang."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def leave_within(self, seconds: float) -> None:
        """Set the time left [s], replacing any earlier value."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, os._exit, [EXIT_FORCED])
        self._timer.daemon = True
        self._timer.start()

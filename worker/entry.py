"""Start a worker process of either role: load the model, open the network, serve, and drain on a
signal.
"""

from __future__ import annotations

import signal
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog
import trio

from engine.backend import kernels_report
from engine.device_thread import DeviceThread
from engine.load import load_engine
from engine.probe.golden import Expected
from store.measured import golden_for
from transport.zmq_network import ZmqNetwork
from triolet.config.members import Member
from triolet.errors import ConfigError
from triolet.status import Progress, WorkerReady, report

from .health import answer_probes, bind_health
from .local_engine import Cores, LocalEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractContextManager

    from engine.load import Engine
    from engine.model_config import ModelConfig
    from store.measured import MeasurementKey
    from transport.link import Network
    from triolet.config import WorkerConfig
    from triolet.ids import Role

    from .engine_port import EnginePort
    from .worker_loop import Device, WorkerLoop


def num_parameters(model: ModelConfig) -> int:
    """Return the number of weights, tied ones counted once."""
    hidden, inner = model.hidden_size, model.intermediate_size
    query = model.num_heads * model.head_dim
    key_value = 2 * model.num_kv_heads * model.head_dim
    layer = hidden * (query + key_value) + query * hidden + 3 * hidden * inner + 2 * hidden
    layer += (query + key_value) * model.biases.qkv + hidden * model.biases.output
    layer += (2 * inner + hidden) * model.biases.mlp
    layer += 2 * model.head_dim * model.has_qk_norm
    embeddings = model.vocab_size * hidden * (1 if model.is_tied else 2)
    return embeddings + model.num_layers * layer + hidden


log = structlog.get_logger()

PROGRESS_UNITS: Final = 1000
"""Progress of a stage is reported in thousandths."""


class Serve(Protocol):
    """A role's serving function."""

    async def __call__(
        self,
        config: WorkerConfig,
        engine: EnginePort,
        device: Device,
        control_network: Network,
        kv_network: Network,
        *,
        task_status: trio.TaskStatus[WorkerLoop],
    ) -> None:
        """Serve until drained; started with the loop once peers can connect."""
        ...


async def run_worker(
    role: Role,
    config: WorkerConfig,
    serve: Serve,
    *,
    task_status: trio.TaskStatus[WorkerLoop] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Load the model, serve, and drain on SIGTERM or SIGINT; a second signal exits at once.

    Raises:
      ConfigError: the model or a setting is invalid.
    """
    settings = config.engine
    # A thread that only feeds a GPU computes nothing itself and must not wait for those that do.
    niceness = settings.niceness if settings.device == "cpu" else 0
    async with DeviceThread(
        settings.max_waiting_steps, settings.threads, settings.close_timeout_s, niceness
    ) as device:
        load = partial(load_engine, find_golden=partial(find_golden, config))
        loaded = await device.run(load, Path(config.model_dir), settings, report_progress)
        if loaded.gpu_memory is None:
            log.info("kernels_ready", **await device.run(kernels_report, loaded.key.backend))
        with (
            _cores_of(config) as cores,
            closing(ZmqNetwork(config.link, config.curve_dir)) as control_network,
            closing(_kv_network(config)) as kv_network,
            trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals,
        ):
            async with trio.open_nursery() as nursery:

                async def serve_until_drained(*, task_status: trio.TaskStatus[WorkerLoop]) -> None:
                    await serve(
                        config,
                        LocalEngine(loaded, cores),
                        device,
                        control_network,
                        kv_network,
                        task_status=task_status,
                    )
                    nursery.cancel_scope.cancel()

                loop = await nursery.start(serve_until_drained)
                if config.health_address:
                    listener = bind_health(config.health_address, config.health.max_connections)
                    nursery.start_soon(answer_probes, listener, loop, config.health)
                if config.membership.redis.url:
                    nursery.start_soon(registering(role, config))
                report(_ready(config, loaded))
                log.info("worker_ready", name=config.name)
                task_status.started(loop)
                await _heed_signals(signals, loop, config.drain_timeout_s)
                nursery.cancel_scope.cancel()


def registering(role: Role, config: WorkerConfig) -> Callable[[], Awaitable[None]]:
    """Return a task that keeps a worker registered in Redis. It never delays or ends the worker.

    Raises:
      ConfigError: the registration, or the file with the URL, is unusable.
    """
    # Imported late: Redis's client costs memory and a quarter of a second.
    from transport.registrations import REGISTER, RegistrationCalls, written_registration

    own = config.membership
    text = written_registration(
        Member(role, own.address or config.control_address, own.model), config.labels.told
    )
    calls = RegistrationCalls(own.redis, "worker.membership.redis.url")
    return partial(calls.repeat, own.renew_s, REGISTER, text, own.ttl_s)


def find_golden(config: WorkerConfig, key: MeasurementKey) -> Expected | None:
    """Return the golden tokens that this worker must reproduce, if there are any.

    Raises:
      ModelError: some are damaged.
    """
    if not config.model_digest or not config.model_store:
        return None
    found = golden_for(Path(config.model_store), config.model_digest, key)
    if found is None:
        return None
    golden, path = found
    return Expected(golden.prompts, str(path))


def _kv_network(config: WorkerConfig) -> ZmqNetwork:
    if config.link.wire.plaintext and config.curve_dir is None:
        raise ConfigError(
            "link.wire.plaintext opens the KV link only, and there are no keys for control; make "
            "them with `triolet keys make DIR` and set worker.curve_dir=DIR"
        )
    return ZmqNetwork(config.link, config.curve_dir, is_plain=config.link.wire.plaintext)


def _cores_of(config: WorkerConfig) -> AbstractContextManager[Cores | None]:
    """Return the cores that steps may use, if the worker can borrow some."""
    if config.lending is None or config.engine.threads is None:
        return nullcontext()
    return closing(Cores(config.lending, config.engine.threads))


async def _heed_signals(
    signals: AsyncIterator[int], loop: WorkerLoop, drain_timeout_s: float
) -> None:
    """Drain at the first signal, return at the second."""
    is_draining = False
    async for number in signals:
        log.info("signal", name=signal.Signals(number).name)
        if is_draining:
            return
        is_draining = True
        loop.drain(drain_timeout_s)


def report_progress(stage: str, share: float) -> None:
    """Report the progress of a stage of the start."""
    report(Progress(stage, round(share * PROGRESS_UNITS), PROGRESS_UNITS))


def _ready(config: WorkerConfig, loaded: Engine) -> WorkerReady:
    return WorkerReady(
        name=config.name,
        parameters=num_parameters(loaded.model_config),
        dtype=str(loaded.pool.layout.dtype).removeprefix("torch."),
        device=config.engine.device,
        num_blocks=loaded.ledger.total_blocks,
        block_size=config.engine.block_size,
        pool_bytes=loaded.pool.num_blocks * loaded.pool.bytes_per_block,
        max_model_len=loaded.max_model_len,
        gpu_memory=loaded.gpu_memory,
    )

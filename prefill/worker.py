"""Entry point of the prefill worker process: put core, sockets and device thread together."""

from __future__ import annotations

from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import structlog
import trio

from transport.shared_ring import OwnRing, PrivateRing
from triolet.config import MemorySharing
from triolet.errors import ConfigError
from triolet.ids import Role, new_epoch
from worker.entry import run_worker
from worker.identity import Identity
from worker.worker_loop import WorkerLoop, read_process

from .core import PrefillCore
from .links import KvLinks

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.link import Network
    from transport.shared_ring import RingMemory
    from triolet.config import LinkConfig, WorkerConfig
    from worker.engine_port import EnginePort
    from worker.worker_loop import Device

log = structlog.get_logger()


async def serve(
    config: WorkerConfig,
    engine: EnginePort,
    device: Device,
    control_network: Network,
    kv_network: Network,
    *,
    draw_epoch: Callable[[], int] = new_epoch,
    make_ring: Callable[[int], RingMemory] = OwnRing,
    task_status: trio.TaskStatus[WorkerLoop] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve with a loaded engine until drained.

    Args:
      config: addresses and bounds.
      engine: computes steps.
      device: runs steps.
      control_network: makes the listener for servers.
      kv_network: makes the links to decode workers.
      draw_epoch: returns epochs; replaced by a simulator.
      make_ring: returns memory that others on this host may read.
      task_status: started with the loop once servers can connect.

    Raises:
      ConfigError: the control address cannot be bound, or memory must be shared but cannot.
    """
    identity = _identity(config, engine, draw_epoch)
    with (
        closing(_ring(config.link, make_ring)) as ring,
        closing(
            control_network.listen(
                config.control_address,
                hwm=config.link.control_hwm,
                max_frame_bytes=config.link.max_control_frame_bytes,
            )
        ) as control,
        ExitStack() as stack,
    ):
        stack.callback(engine.unpin, ring.memory)
        if not engine.pin(ring.memory):
            log.warning("ring_not_pinned", bytes=len(ring.memory))
        core = _make_core(engine, identity, config, ring.memory)
        async with trio.open_nursery() as links_nursery:
            links = KvLinks(
                core,
                identity,
                kv_network,
                config.link,
                links_nursery,
                settle=lambda now: loop.settle(now),
                ring=ring.offer,
            )
            loop = WorkerLoop(core, engine, device, control, config, links.flush)
            await loop.run(task_status=task_status)
            links_nursery.cancel_scope.cancel()


def _make_core(
    engine: EnginePort, identity: Identity, config: WorkerConfig, ring: memoryview
) -> PrefillCore:
    now, batching = trio.current_time(), config.engine.embedding
    return PrefillCore(engine, identity, config.link, ring, now, read_process, batching)


def _identity(config: WorkerConfig, engine: EnginePort, draw_epoch: Callable[[], int]) -> Identity:
    return Identity(
        Role.PREFILL,
        config.name,
        engine,
        max_num_seqs=config.engine.max_num_seqs,
        max_waiting_tokens=config.max_waiting_tokens,
        compute_digest=config.compute_digest,
        labels=config.labels.told,
        draw_epoch=draw_epoch,
    )


def _ring(link: LinkConfig, make_ring: Callable[[int], RingMemory]) -> RingMemory:
    """Return a ring that others on this host may read, if that is wanted and possible."""
    if link.wire.share_memory is not MemorySharing.OFF:
        try:
            return make_ring(link.kv_ring_bytes)
        except (OSError, AttributeError) as error:  # not Linux, or forbidden here
            if link.wire.share_memory is MemorySharing.ON:
                raise ConfigError(
                    f"share_kv_memory is on, but this system cannot share memory ({error}); "
                    "allowed here: auto, off"
                ) from error
            log.info("ring_not_shared", why=str(error))
    return PrivateRing(link.kv_ring_bytes)


def main(config: WorkerConfig) -> None:
    """Load the model and serve until SIGTERM.

    Raises:
      ConfigError: the model or a setting is invalid.
    """
    trio.run(run_worker, Role.PREFILL, config, serve)

"""The prefill worker process: the core, its sockets, its device thread.

Knows how the parts are put together; decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from triolet.ids import Role, new_epoch
from worker.entry import run_worker
from worker.identity import Identity
from worker.shell import Shell, read_process

from .core import PrefillCore
from .links import KvLinks

if TYPE_CHECKING:
    from collections.abc import Callable

    from transport.link import Network
    from triolet.config import WorkerConfig
    from worker.engine_port import EnginePort
    from worker.shell import Device


async def serve(
    config: WorkerConfig,
    engine: EnginePort,
    device: Device,
    control_network: Network,
    kv_network: Network,
    *,
    draw_epoch: Callable[[], int] = new_epoch,
    task_status: trio.TaskStatus[Shell] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve with an engine that is loaded, until drained.

    Args:
      config: addresses and bounds.
      engine: what it computes with.
      device: where steps run.
      control_network: makes the listener for servers.
      kv_network: makes the links to decode workers.
      draw_epoch: where epochs come from; a simulator brings its own.
      task_status: started with the shell once servers can connect.

    Raises:
      ConfigError: the control address cannot be bound.
    """
    identity = Identity(
        Role.PREFILL,
        config.name,
        engine,
        max_num_seqs=config.engine.max_num_seqs,
        max_waiting_tokens=config.max_waiting_tokens,
        draw_epoch=draw_epoch,
    )
    core = PrefillCore(
        engine,
        identity,
        config.link,
        ring=memoryview(bytearray(config.link.kv_ring_bytes)),
        now=trio.current_time(),
        read_process=read_process,
    )
    control = control_network.listen(
        config.control_address,
        hwm=config.link.control_hwm,
        max_frame_bytes=config.link.max_control_frame_bytes,
    )
    try:
        async with trio.open_nursery() as links_nursery:
            links = KvLinks(
                core,
                identity,
                kv_network,
                config.link,
                links_nursery,
                settle=lambda now: shell.settle(now),
            )
            shell = Shell(core, engine, device, control, config, links.flush)
            await shell.run(task_status=task_status)
            links_nursery.cancel_scope.cancel()
    finally:
        control.close()


def main(config: WorkerConfig) -> None:
    """Load the model and serve until SIGTERM. Ends the process's work, not the process.

    Raises:
      ConfigError: the model or a setting cannot work.
    """
    trio.run(run_worker, config, serve)

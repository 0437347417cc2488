"""Entry point of the decode worker process: put core, listeners and device thread together."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
import trio

from engine.load import load_engine
from engine.vocabulary import check_same_vocabulary
from transport.link import PeerBusy, PeerGone
from transport.shared_ring import PeerRings, find_ring
from transport.zmq_memory import keep_received_memory
from triolet.config import AUTO_BACKEND, LOOKUP
from triolet.errors import ConfigError
from triolet.ids import Role, new_epoch
from worker.entry import num_parameters, report_progress, run_worker
from worker.identity import Identity
from worker.local_engine import LocalEngine
from worker.worker_loop import WorkerLoop, read_process

from .core import DecodeCore
from .drafts import Drafts, Lookup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from transport.frames import SharedRing
    from transport.link import Listener, Network
    from transport.shared_ring import FoundRing
    from triolet.config import WorkerConfig
    from worker.engine_port import EnginePort
    from worker.worker_loop import Device

    from .speculation import GuessSource

log = structlog.get_logger()

MAX_KV_MESSAGES: Final = 8
"""Chunks received before other tasks get a turn: about 2 ms of copying at 1 MiB each."""

RECEIVE_WINDOWS: Final = 4
"""Number of senders' windows to keep as freed heap memory; more are rarely full at once."""


async def serve(
    config: WorkerConfig,
    engine: EnginePort,
    device: Device,
    control_network: Network,
    kv_network: Network,
    *,
    draw_epoch: Callable[[], int] = new_epoch,
    source: GuessSource | None = None,
    find_ring: Callable[[SharedRing], FoundRing] = find_ring,
    task_status: trio.TaskStatus[WorkerLoop] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve with a loaded engine until drained.

    Args:
      config: addresses and bounds.
      engine: computes steps.
      device: runs steps.
      control_network: makes the listener for servers.
      kv_network: makes the listener for prefill workers; separate, so that bulk data never delays a
        heartbeat.
      draw_epoch: returns epochs; replaced by a simulator.
      source: source of guesses, if not lookup; drafts are computed before each step.
      find_ring: maps rings that prefill workers of this host offer.
      task_status: started with the loop once peers can connect.

    Raises:
      ConfigError: an address cannot be bound, or there is none for KV.
    """
    link = config.link
    with (
        closing(
            control_network.listen(
                config.control_address,
                hwm=link.control_hwm,
                max_frame_bytes=link.max_control_frame_bytes,
            )
        ) as control,
        closing(_listen_for_kv(kv_network, config)) as kv,
        closing(PeerRings(link.max_kv_frame_bytes, find_ring)) as rings,
    ):
        announced = config.advertised_kv_address or kv.address
        core = _core(config, engine, announced, draw_epoch, source, rings)
        loop = WorkerLoop(
            core,
            engine,
            device,
            control,
            config,
            flush_kv=lambda now: _answer_kv(kv, core),
            before_step=_drafting(core, source, device),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_receive_kv, kv, core, loop)
            await loop.run(task_status=task_status)
            nursery.cancel_scope.cancel()


def _listen_for_kv(network: Network, config: WorkerConfig) -> Listener:
    if config.kv_address is None:
        raise ConfigError("kv_address is None; allowed: an ipc:// or tcp:// address")
    if config.link.wire.plaintext and config.kv_address.startswith("ipc://"):
        raise ConfigError(
            f"kv-plaintext is for tcp; KV is taken at {config.kv_address}, which needs no keys: "
            "leave link.wire.plaintext off"
        )
    link = config.link
    return network.listen(
        config.kv_address, hwm=link.kv_hwm, max_frame_bytes=link.max_kv_frame_bytes
    )


def _core(
    config: WorkerConfig,
    engine: EnginePort,
    kv_address: str,
    draw_epoch: Callable[[], int],
    source: GuessSource | None,
    rings: PeerRings,
) -> DecodeCore:
    identity = Identity(
        Role.DECODE,
        config.name,
        engine,
        max_num_seqs=config.engine.max_num_seqs,
        kv_window_bytes=config.link.kv_window_bytes,
        kv_address=kv_address,
        compute_digest=config.compute_digest,
        labels=config.labels.told,
        draw_epoch=draw_epoch,
    )
    if config.speculation.source == LOOKUP:
        source = Lookup(config.speculation)
    return DecodeCore(
        engine,
        identity,
        config.link,
        trio.current_time(),
        read_process,
        source,
        config.speculation,
        rings,
    )


def _drafting(
    core: DecodeCore, source: GuessSource | None, device: Device
) -> Callable[[], Awaitable[None]] | None:
    """Return a function that computes a round of drafts, if guesses come from a draft model."""
    if not isinstance(source, Drafts):
        return None

    async def draft() -> None:
        rows = source.plan(core.stepper.wanted_guesses())
        if not rows:
            return
        try:
            guesses = await device.run(source.compute, rows)
        except Exception:
            # Answers do not depend on guesses: continue without them.
            log.exception("draft_failed", rows=len(rows))
            source.fail()
        else:
            source.complete(guesses)

    return draft


async def _receive_kv(kv: Listener, core: DecodeCore, loop: WorkerLoop) -> None:
    while True:
        messages = await kv.receive_many(MAX_KV_MESSAGES)
        now = trio.current_time()
        core.wake(now)
        for message in messages:
            core.on_kv(message.sender, message.frame, message.payload, now)
            # Answer at once, so that the sender's next chunk is under way while this one is copied.
            _answer_kv(kv, core)
        loop.settle(now)


def _answer_kv(kv: Listener, core: DecodeCore) -> None:
    for send in core.outbox.take_for_senders():
        try:
            kv.send_nowait(send.to, send.frame)
        except (PeerGone, PeerBusy) as error:
            # If it is alive it sends unanswered chunks again. A restarted prefill worker is gone
            # before its last answer, which does no harm.
            log.info("kv_answer_unsent", error=str(error))


def load_drafts(config: WorkerConfig, draft_dir: Path, vocab_size: int) -> Drafts:
    """Load a draft model. Blocking; runs on the device thread.

    Args:
      config: config of the worker.
      draft_dir: directory of the draft model.
      vocab_size: vocabulary size of the main model.

    Raises:
      ConfigError: the draft model cannot be loaded, or has another vocabulary.
    """
    check_same_vocabulary(Path(config.model_dir), draft_dir)
    settings = replace(
        config.engine,
        backend=AUTO_BACKEND,
        kv_pool_bytes=config.speculation.draft_pool_bytes,
        max_model_len=None,
        prefix_cache=False,
        host_cache_bytes=0,
        adapters=(),
    )
    try:
        loaded = load_engine(
            draft_dir, settings, lambda stage, share: report_progress(f"draft_{stage}", share)
        )
    except ConfigError as error:
        raise ConfigError(f"the draft model cannot be used: {error}") from error
    log.info(
        "draft_ready", parameters=num_parameters(loaded.model_config), length=loaded.max_model_len
    )
    return Drafts(LocalEngine(loaded), config.speculation, vocab_size)


async def _load_and_serve(
    config: WorkerConfig,
    engine: EnginePort,
    device: Device,
    control_network: Network,
    kv_network: Network,
    *,
    task_status: trio.TaskStatus[WorkerLoop],
) -> None:
    keep_received_memory(RECEIVE_WINDOWS * config.link.kv_window_bytes)
    drafts = None
    if config.speculation.draft_dir is not None:
        draft_dir = Path(config.speculation.draft_dir)
        drafts = await device.run(load_drafts, config, draft_dir, engine.vocab_size)
    await serve(
        config,
        engine,
        device,
        control_network,
        kv_network,
        source=drafts,
        task_status=task_status,
    )


def main(config: WorkerConfig) -> None:
    """Load the model and serve until SIGTERM.

    Raises:
      ConfigError: the model or a setting is invalid.
    """
    trio.run(run_worker, Role.DECODE, config, _load_and_serve)

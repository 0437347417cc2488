"""`triolet model probe`: measure a version's golden tokens and capacity on this machine."""

from __future__ import annotations

import gc
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import trio

from engine.arithmetic import host_class
from engine.device_thread import DeviceThread
from engine.load import load_engine
from engine.probe.capacity import measure_rates
from engine.probe.golden import Expected, GoldenSteps
from store.measured import Golden, GoldenPrompt, MeasuredCapacity
from triolet.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.config import WorkerConfig

GOLDEN_TOKENS: Final = 4
"""Golden tokens per prompt: a start checks them in one step, and they hardly change its cost."""


class Probed(NamedTuple):
    """Results of a probe.

    Attributes:
      golden: tokens.
      capacity: capacity of one worker.
    """

    golden: Golden
    capacity: MeasuredCapacity


def main(config: WorkerConfig, prompts: Sequence[Sequence[int]]) -> Probed:
    """Load a model as a worker does, and measure its golden tokens and speed.

    Args:
      config: config of the worker.
      prompts: token ids.

    Raises:
      ConfigError: the model or a setting is invalid.
    """
    return trio.run(_probe, config, prompts)


async def _probe(config: WorkerConfig, prompts: Sequence[Sequence[int]]) -> Probed:
    engine = config.engine
    async with DeviceThread(
        engine.max_waiting_steps, engine.threads, engine.close_timeout_s
    ) as device:
        return await device.run(_measure, config, prompts)


def _measure(config: WorkerConfig, prompts: Sequence[Sequence[int]]) -> Probed:
    settings, directory = config.engine, Path(config.model_dir)
    # The first load reads files and packs weights; later ones reuse the result.
    load_engine(directory, settings, lambda stage, share: None)
    gc.collect()
    began_at = perf_counter()
    engine = load_engine(directory, settings, lambda stage, share: None)
    load_s = perf_counter() - began_at
    steps = GoldenSteps(
        engine.runner,
        engine.ledger,
        settings.block_size,
        engine.max_model_len,
        engine.model_config,
    )
    tokens = steps.compute(prompts, GOLDEN_TOKENS)
    found = tuple(GoldenPrompt(tuple(ids), own) for ids, own in zip(prompts, tokens, strict=True))
    try:
        steps.check(Expected(found, "the same worker"))
    except ModelError as error:
        raise ModelError(
            f"{config.model_dir} gives different results when a sequence is computed in one step "
            "and "
            f"token by token, so it has no golden tokens here ({error}); use another backend or "
            "dtype"
        ) from error
    rates = measure_rates(engine, settings.max_num_batched_tokens, settings.max_num_seqs)
    host = f"{host_class(engine.pool.blocks.device)},{settings.threads}-threads"
    key = msgspec.structs.replace(engine.key, host=host)
    capacity = MeasuredCapacity(key, *rates, load_s)
    return Probed(Golden(engine.key, found), capacity)

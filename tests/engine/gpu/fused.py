"""Test helper that opens an engine with the fused kernels on the tests' device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.backend import build_runner
from engine.block_ledger import BlockLedger
from engine.constraints import Constraints
from engine.kv_pool import KVLayout, KVPool
from engine.load import TORCH_DTYPES, Engine
from engine.model_config import load_eos_token_ids, load_model_config
from engine.pace import Pace
from engine.prefix_cache import PrefixCache
from engine.weights import Checkpoint
from store.measured import MeasurementKey

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from triolet.config import EngineConfig

NUM_BLOCKS = 120
MAX_MODEL_LEN = 400


def fused_engine(path: Path, device: torch.device, config: EngineConfig) -> Engine:
    """Load a model with a GPU backend, which `load_engine` would refuse on a CPU."""
    model_config = load_model_config(path)
    layout = KVLayout(
        model_config.num_layers,
        config.block_size,
        model_config.num_kv_heads,
        model_config.head_dim,
        TORCH_DTYPES[config.chosen_dtype],
    )
    pool = KVPool(layout, NUM_BLOCKS, device)
    ledger = BlockLedger(NUM_BLOCKS)
    runner = build_runner(
        config.backend,
        model_config,
        Checkpoint(path),
        pool,
        config,
        MAX_MODEL_LEN,
        lambda stage, share: None,
    )
    return Engine(
        runner,
        pool,
        ledger,
        PrefixCache(ledger, config.block_size, pool),
        "fingerprint",
        MeasurementKey(config.backend, config.chosen_dtype.value, "a test"),
        model_config,
        load_eos_token_ids(path),
        MAX_MODEL_LEN,
        "a test",
        Pace(512, 0.1, 0.1, 16, 512, 512),
        Constraints(path / "tokenizer.json", model_config.vocab_size, load_eos_token_ids(path)),
    )

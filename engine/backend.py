"""Choose the compute backend named in the config, check it, and build model and runner."""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import torch

from triolet.config import AUTO_BACKEND, EngineConfig, WeightFormat
from triolet.errors import ConfigError

from .adapters.tensors import load_adapters
from .attention.registry import create_attention
from .attention.traits import FUSED, NATIVE, check_backend
from .gpu.build import build_parts, capture
from .model import TorchModel, Transformer
from .native.library import library_path, load_library
from .native.model import NativeModel, PackedModel
from .native.packing import own_pages
from .native.pieces import Packing
from .rope import RotaryTable
from .runner import Runner
from .snapshots.file import SnapshotKey
from .snapshots.makers import CODE_DIGEST
from .weights import WeightReader, load_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .adapters.tensors import Adapter
    from .kv_pool import KVPool
    from .model_config import ModelConfig
    from .runner import StepModel
    from .snapshots.folder import Snapshots
    from .weights import Checkpoint

_HIDDEN_SIZE_MULTIPLE: Final = 16
ADVANTAGES: Final = {
    "avx512bf16": ("AVX-512 bf16", "bfloat16 is multiplied as float32"),
    "avx512vnni": ("AVX-512 VNNI", "quantised weights take more instructions"),
    "avx512": ("AVX-512", "a vector holds 8 numbers instead of 16"),
    "avxvnni": ("AVX-VNNI", "quantised weights take more instructions"),
    "avx2": ("AVX2 and FMA", "torch computes, at half the speed or less"),
}
"""For each build of the kernels: its instruction set, and what happens without it."""
NO_ADAPTERS: Final[Mapping[bytes, Adapter]] = {}


def choose_backend(config: EngineConfig, model: ModelConfig, device_type: str) -> str:
    """Return the name of the backend to use.

    Raises:
      ConfigError: the configured backend does not exist, cannot serve this model here, or does not
        support adapters and the config has some.
    """
    if config.backend == AUTO_BACKEND:
        return "sdpa" if _why_not_native(config, model, device_type) else NATIVE.name
    check_backend(config, config.chosen_dtype, model.head_dim, device_type)
    if config.backend == NATIVE.name and (reason := _why_not_native(config, model, device_type)):
        raise ConfigError(f"backend is 'native', but {reason}; use backend 'sdpa'")
    return config.backend


def _why_not_native(config: EngineConfig, model: ModelConfig, device_type: str) -> str | None:
    """Return why the kernels cannot compute a model, or None."""
    try:
        NATIVE.check(device_type, config.chosen_dtype, config.block_size, model.head_dim)
    except ConfigError as error:
        return str(error)
    if model.hidden_size % _HIDDEN_SIZE_MULTIPLE:
        return f"the model's hidden_size {model.hidden_size} is not a multiple of 16"
    library = load_library()
    if library is None:
        return "its kernels are not built for this machine (`triolet doctor` says why)"
    if model.num_heads // model.num_kv_heads > library.rows_per_task:
        return f"the model has more than {library.rows_per_task} query heads per key head"
    return None


def kernels_report(backend: str) -> dict[str, object]:
    """Return the kernels' build, the CPU cores used and what is missing, for the log.

    Args:
      backend: the result of `choose_backend`.
    """
    library = load_library()
    if library is not None and backend != NATIVE.name:
        build, lacks = "none", [f"the backend is {backend!r}: torch computes, not our kernels"]
    else:
        build = "none" if library is None else library.build
        lacks = [_why_not_build(one) for one in takewhile(lambda one: one != build, ADVANTAGES)]
    is_linux = sys.platform == "linux"
    cores = len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1
    return {"build": build, "threads": torch.get_num_threads(), "cores": cores, "lacks": lacks}


def _why_not_build(build: str) -> str:
    instructions, without = ADVANTAGES[build]
    if library_path(build) is None:
        return f"the build for {instructions} is not installed: {without}"
    return f"this CPU has no {instructions}: {without}"


def build_model(
    backend: str,
    weights: WeightFormat,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    pool: KVPool,
    max_model_len: int,
    on_progress: Callable[[float], None],
    snapshots: Snapshots | None = None,
    adapters: Mapping[bytes, Adapter] = NO_ADAPTERS,
) -> StepModel:
    """Read the weights and return the model that computes with them.

    Args:
      backend: the result of `choose_backend`.
      weights: format in which weights are kept.
      model_config: the model's shape.
      checkpoint: the model's tensors.
      pool: the KV pool; also sets dtype and device.
      max_model_len: longest sequence.
      on_progress: called with the share of layers loaded.
      snapshots: where packed weights are kept; None to keep none.
      adapters: adapters that rows may name, by digest.

    Raises:
      ModelError: a tensor is missing, unknown or of another shape.
      ConfigError: the backend's package is not installed, or memory does not suffice.
    """
    dtype, device = pool.layout.dtype, pool.blocks.device
    if backend == NATIVE.name:
        library = load_library()
        assert library is not None, "choose_backend has looked"
        keeps_blocks = weights is WeightFormat.AUTO
        reader = WeightReader(model_config, checkpoint, dtype, device, keeps_blocks=keeps_blocks)
        packing = Packing(model_config, reader, library, on_progress)
        if snapshots is None:
            pieces = dict(packing.pieces(own_pages, torch.get_num_threads()))
        else:
            key = SnapshotKey(
                weights=snapshots.weights_digest(),
                place=snapshots.place,
                shape=model_config.digest,
                dtype=str(dtype),
                format=weights.value,
                kernels=f"{library.build}-{library.digest}-{CODE_DIGEST}-{sys.byteorder}",
            )
            pieces = snapshots.load(key, packing, torch.get_num_threads())
        rotary = RotaryTable(model_config.rope, model_config.head_dim, max_model_len, device)
        packed = PackedModel(model_config, pieces, rotary, pool, library, adapters)
        return NativeModel(packed, library, model_config.vocab_size)
    tensors = load_weights(model_config, checkpoint, dtype, device, on_progress)
    attention = create_attention(backend, pool, model_config.num_heads, max_model_len)
    return TorchModel(Transformer(model_config, tensors, max_model_len), attention, adapters)


def build_runner(
    backend: str,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    pool: KVPool,
    config: EngineConfig,
    max_model_len: int,
    on_progress: Callable[[str, float], None],
    snapshots: Snapshots | None = None,
) -> Runner:
    """Read the weights and return a runner that computes steps with them.

    Args:
      backend: the result of `choose_backend`.
      model_config: the model's shape.
      checkpoint: the model's tensors.
      pool: the KV pool; also sets dtype and device.
      config: sizes of steps.
      max_model_len: longest sequence.
      on_progress: called with (stage, share of it done): `weights`, and `graphs` where decode steps
        are captured.
      snapshots: where packed weights are kept; None to keep none.

    Raises:
      ModelError: a tensor is missing, unknown or of another shape.
      ConfigError: the backend's package is not installed, or memory does not suffice.
    """
    on_weights = partial(on_progress, "weights")
    dtype, device = pool.layout.dtype, pool.blocks.device
    if backend not in FUSED:
        adapters = load_adapters(
            config.adapters, config.max_adapter_rank, model_config, dtype, device
        )
        model = build_model(
            backend,
            config.weights,
            model_config,
            checkpoint,
            pool,
            max_model_len,
            on_weights,
            snapshots,
            adapters,
        )
        return Runner(model, config.block_size, pool, masks=config.masks)
    weights = load_weights(model_config, checkpoint, dtype, device, on_weights)
    parts = build_parts(backend, model_config, weights, pool, config, max_model_len)
    if config.gpu.cuda_graphs and device.type == "cuda":
        try:
            with torch.inference_mode():
                capture(backend, parts.decoder, partial(on_progress, "graphs"))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"kv_pool_bytes is {config.kv_pool_bytes} and leaves {device} no memory to capture "
                "decode steps in: lower it, or max_num_seqs, or set "
                "worker.engine.gpu.cuda_graphs=false"
            ) from error
    return Runner(parts.model, config.block_size, pool, parts.decoder, config.masks)

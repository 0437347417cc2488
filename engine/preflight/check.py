"""Check within a second whether a model can be served on this machine with given settings.

Reads the model's JSON files, the headers of its weights and the machine's devices.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from dataclasses import replace
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from store.gguf.container import read_gguf
from store.gguf.directory import gguf_weights
from store.model_dir.headers import read_headers, weight_files
from triolet.config import AUTO_BACKEND, AUTO_DEVICE, Dtype, WeightFormat, require
from triolet.errors import ConfigError
from triolet.memory import available_memory_bytes

from ..adapters.shapes import adapter_numbers
from ..attention.traits import ALL_TRAITS, NATIVE, check_backend
from ..model_config import load_model_config
from .gguf import COMPUTED, check_gguf_tensors
from .tensors import check_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from triolet.config import EngineConfig

    from ..model_config import ModelConfig

DTYPE_BYTES: Final = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2}
_DEVICE: Final = re.compile(r"cpu|cuda(?::\d+)?")
_GPU_FILES: Final = ("nvidia[0-9]*", "dxg", "nvhost-gpu", "nvmap")
"""Device files of NVIDIA's driver on a PC, under WSL, and on Jetson boards."""
_NO_CUDA: Final = re.compile(r"^cuda\b[^=]*=\s*None\s*$", re.MULTILINE)


class CheckedModel(NamedTuple):
    """A model that passed the checks.

    Attributes:
      config: the model's shape.
      weight_bytes: size of all weight files.
      loaded_bytes: memory of the weights in a worker.
      adapter_bytes: memory of the adapters in a worker.
      max_model_len: longest sequence that model and pool allow.
      dtype: dtype of the computation.
      engine: the settings with the device chosen, and the pool's size if it is known without the
        device's driver.
    """

    config: ModelConfig
    weight_bytes: int
    loaded_bytes: int
    adapter_bytes: int
    max_model_len: int
    dtype: Dtype
    engine: EngineConfig


class CheckedWeights(NamedTuple):
    """Weights with valid headers.

    Attributes:
      files: files with weights.
      dtype: dtype of most weights, by safetensors' or llama.cpp's name.
      num_numbers: numbers in all tensors.
      num_quantised: quantised numbers that the native kernels use as stored.
      block_bytes: size of the quantised numbers.
    """

    files: list[Path]
    dtype: str
    num_numbers: int
    num_quantised: int = 0
    block_bytes: int = 0


def check_model(model_dir: Path, engine: EngineConfig) -> CheckedModel:
    """Check a model against the settings of its workers.

    Args:
      model_dir: the model's directory.
      engine: settings of the workers' engine.

    Raises:
      ModelError: the model is broken, incomplete or of an unsupported kind.
      ConfigError: a setting cannot work with this model or on this machine.
    """
    model = load_model_config(model_dir)
    weights = check_weights(model, model_dir)
    engine = replace(engine, device=chosen_device(engine))
    device_type = check_device(engine.device)
    dtype = dtype_for(engine, weights.dtype)
    if engine.backend != AUTO_BACKEND:
        check_backend(engine, dtype, model.head_dim, device_type)
    bytes_per_token = (
        2 * model.num_layers * model.num_kv_heads * model.head_dim * DTYPE_BYTES[dtype]
    )
    bytes_per_block = engine.block_size * bytes_per_token
    # A GPU's free memory is known to its driver only, which a worker asks later.
    free_bytes = available_memory_bytes() if device_type == "cpu" else None
    adapter_bytes = adapter_numbers(engine.adapters, model) * DTYPE_BYTES[dtype]
    sized = with_pool_size(engine, model, bytes_per_block, free_bytes, adapter_bytes)
    max_model_len, _ = fit_model_len(sized, model, bytes_per_block)
    return CheckedModel(
        model,
        sum(path.stat().st_size for path in weights.files),
        _loaded_bytes(engine, weights, DTYPE_BYTES[dtype]),
        adapter_bytes,
        max_model_len,
        dtype,
        sized if device_type == "cpu" else engine,
    )


def _loaded_bytes(engine: EngineConfig, weights: CheckedWeights, dtype_bytes: int) -> int:
    """Return the memory that weights take, assuming that the native kernels are built."""
    is_native = engine.device == "cpu" and engine.backend in (AUTO_BACKEND, NATIVE.name)
    if not is_native or engine.weights is WeightFormat.DTYPE:
        return weights.num_numbers * dtype_bytes
    return (weights.num_numbers - weights.num_quantised) * dtype_bytes + weights.block_bytes


def check_weights(model: ModelConfig, model_dir: Path) -> CheckedWeights:
    """Check the headers of the weights, in safetensors or GGUF files.

    Raises:
      ModelError: a file is missing or broken, or its tensors do not match the model.
    """
    if (path := gguf_weights(model_dir)) is not None:
        file = read_gguf(path)
        check_gguf_tensors(model, file)
        blocks = [place for place in file.tensors.values() if place.encoding in COMPUTED]
        return CheckedWeights(
            [path],
            file.encoding,
            file.num_numbers.total(),
            sum(prod(place.shape) for place in blocks),
            sum(place.num_bytes for place in blocks),
        )
    files = weight_files(model_dir)
    stored = read_headers(files)
    check_tensors(model, stored, model_dir)
    num_numbers = sum(prod(tensor.shape) for tensor in stored.values())
    return CheckedWeights(files, most_common(each.dtype for each in stored.values()), num_numbers)


def chosen_device(engine: EngineConfig) -> str:
    """Return the configured device; for `auto`, a GPU if one is usable.

    Raises:
      ConfigError: `auto` finds no GPU, and the configured backend needs one.
    """
    if engine.device != AUTO_DEVICE:
        return engine.device
    traits = ALL_TRAITS.get(engine.backend)
    needs_gpu = traits is not None and "cpu" not in traits.device_types
    if engine.backend == NATIVE.name:
        return "cpu"
    missing = _missing_gpu()
    if missing is not None and needs_gpu:
        raise ConfigError(
            f"device is 'auto', which chose 'cpu' because {missing.reason}; backend "
            f"{engine.backend!r} needs 'cuda'; use backend 'auto', or {missing.cure}"
        )
    return "cuda" if missing is None else "cpu"


def check_device(device: str) -> str:
    """Return the type of a device, after checking that nothing rules it out.

    Raises:
      ConfigError: this machine has no such device, or torch is built without support for it.
    """
    if not _DEVICE.fullmatch(device):
        raise ConfigError(f"device is {device!r}; allowed: auto, cpu, cuda, cuda:1 and so on")
    if device == "cpu":
        return device
    missing = _missing_gpu()
    if missing is not None:
        raise ConfigError(
            f"device is {device!r}, but {missing.reason}; use device 'cpu', or {missing.cure}"
        )
    return "cuda"


class _MissingGpu(NamedTuple):
    """Why no GPU can be used, and how to change that."""

    reason: str
    cure: str


def _missing_gpu() -> _MissingGpu | None:
    """Return why no GPU can be used, or None."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return _MissingGpu(
            f"CUDA_VISIBLE_DEVICES is {visible!r} and hides every GPU",
            "unset CUDA_VISIBLE_DEVICES",
        )
    if not any(found for pattern in _GPU_FILES for found in Path("/dev").glob(pattern)):
        return _MissingGpu(
            "this machine shows no NVIDIA GPU (there is no /dev/nvidia0)",
            "install the driver; a container needs the GPU passed to it",
        )
    if is_cpu_torch():
        return _MissingGpu(
            "torch is the build for CPUs",
            "install torch for CUDA: pip install 'torch>=2.11' without constraints.txt",
        )
    return None


def is_cpu_torch() -> bool:
    """Return whether the installed torch is a CPU build, by its version."""
    spec = importlib.util.find_spec("torch")  # does not import it
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    if not version.is_file():
        return False
    return _NO_CUDA.search(version.read_text(encoding="utf-8")) is not None


def most_common(dtypes: Iterable[str]) -> str:
    """Return the most common dtype, by safetensors' name: F32, BF16, F16 …"""
    counts = Counter(dtypes).most_common(1)
    return counts[0][0] if counts else "F32"


def dtype_for(config: EngineConfig, stored: str) -> Dtype:
    """Return the dtype of the computation. See EngineConfig.dtype.

    Args:
      config: settings of the engine.
      stored: dtype of most weights, by safetensors' or llama.cpp's name.
    """
    if config.dtype is not Dtype.AUTO:
        return config.dtype
    return Dtype.FLOAT32 if stored in {"F32", "F64"} else Dtype.BFLOAT16


def with_pool_size(
    config: EngineConfig,
    model_config: ModelConfig,
    bytes_per_block: int,
    free_bytes: int | None,
    adapter_bytes: int = 0,
) -> EngineConfig:
    """Return the settings with the size of the KV pool. See EngineConfig.kv_pool_bytes.

    Args:
      config: settings of the engine.
      model_config: the model's shape.
      bytes_per_block: size of a block of the pool.
      free_bytes: free memory of the device; None if unknown.
      adapter_bytes: memory of the worker's adapters, taken from the pool's share.

    Raises:
      ConfigError: the free memory does not hold a sequence of the configured length, or of any.
    """
    if config.kv_pool_bytes is not None:
        return config
    length = min(config.max_model_len or model_config.max_model_len, model_config.max_model_len)
    row_tokens = max(length * config.kv_pool_context_share, min(config.kv_pool_row_tokens, length))
    row_blocks = ceil(row_tokens / config.block_size)
    wanted_blocks = max(1 + config.max_num_seqs * row_blocks, _blocks_of(length, config))
    wanted_bytes = wanted_blocks * bytes_per_block
    if free_bytes is not None:
        share = config.kv_pool_memory_share
        share_bytes = max(0, int(free_bytes * share) - adapter_bytes)
        wanted_bytes = min(wanted_bytes, share_bytes)
        least_bytes = bytes_per_block * (_blocks_of(length, config) if config.max_model_len else 2)
        if wanted_bytes < least_bytes:
            tokens = config.max_model_len or config.block_size
            beside = f", without the {adapter_bytes} of adapters" if adapter_bytes else ""
            fewer = "fewer adapters, " if adapter_bytes else ""
            raise ConfigError(
                f"{free_bytes} bytes of memory are free, and kv_pool_memory_share is {share:g}: "
                f"{wanted_bytes} bytes{beside}; the KV of {tokens} tokens takes {least_bytes}; "
                f"free memory, give {fewer}a smaller max_model_len, or give kv_pool_bytes"
            )
    return replace(config, kv_pool_bytes=wanted_bytes)


def _blocks_of(length: int, config: EngineConfig) -> int:
    """Return the blocks that a sequence needs, including one to write into."""
    return 1 + -(-length // config.block_size)


def fit_model_len(
    config: EngineConfig, model_config: ModelConfig, bytes_per_block: int
) -> tuple[int, str]:
    """Return the longest sequence that model and pool allow, and what limits it.

    Args:
      config: settings of the engine, the size of the pool among them.
      model_config: the model's shape.
      bytes_per_block: size of a block of the pool.

    Raises:
      ConfigError: the pool does not hold a sequence of the configured length, or of any.
    """
    assert config.kv_pool_bytes is not None
    num_blocks = config.kv_pool_bytes // bytes_per_block
    length, reason = model_config.max_model_len, model_config.max_model_len_reason
    if config.max_model_len is not None:
        require(
            1 <= config.max_model_len <= length,
            "max_model_len",
            config.max_model_len,
            f"1…{length} ({reason})",
        )
        length, reason = config.max_model_len, "the setting max_model_len"
    wanted_blocks = _blocks_of(length, config)
    if num_blocks >= wanted_blocks:
        return length, reason
    if config.max_model_len is not None or num_blocks < 2:
        least = 2 if config.max_model_len is None else wanted_blocks
        raise ConfigError(
            f"kv_pool_bytes is {config.kv_pool_bytes}, which is {num_blocks} blocks of "
            f"{bytes_per_block} bytes; allowed: at least {least * bytes_per_block}"
            + (f", or a smaller max_model_len than {length}" if least > 2 else "")
        )
    held = (num_blocks - 1) * config.block_size
    return held, f"kv_pool_bytes of {config.kv_pool_bytes}; the model allows {length}"

"""Load a model: read its directory, size the KV pool, read weights, warm up, return an Engine.

Errors name the config field or the file to change.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from store.gguf.directory import gguf_weights
from store.measured import MeasurementKey
from triolet.adapter_keys import adapters_mark, digest_bytes
from triolet.config import Dtype, EngineConfig, WeightFormat, require
from triolet.errors import CapacityError, ConfigError
from triolet.memory import available_memory_bytes
from triolet.sampling import SamplingParams
from triolet.status import GpuMemory
from triolet.units import MIB

from .adapters.shapes import adapter_numbers
from .arithmetic import arithmetic
from .attention.traits import ALL_TRAITS, NATIVE
from .backend import build_runner, choose_backend
from .batch import SampleSpec, StepRow
from .block_ledger import BlockLedger
from .constraints import Constraints
from .host_tier import HostTier
from .kv_pool import KVLayout, KVPool
from .model_config import ModelConfig, load_eos_token_ids, load_model_config
from .pace import MEASURED_TOKENS, TRIED_TOKENS, Pace, pace_of
from .prefix_cache import PrefixCache
from .preflight.check import chosen_device, dtype_for, fit_model_len, with_pool_size
from .probe.golden import GoldenSteps
from .snapshots.folder import Snapshots
from .weights import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from triolet.config import MaskConfig

    from .probe.golden import Expected, FindGolden
    from .runner import Runner

    FirstSteps: TypeAlias = Callable[
        [Runner, BlockLedger, EngineConfig, int, Callable[[float], None]], Pace
    ]

TORCH_DTYPES: Final = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16}
CONTEXT_BYTES: Final = 512 * MIB
"""GPU memory of a process beside its tensors: the driver's context and loaded kernels take 300 to
600 MiB, and no call separates them from other processes' memory."""
_NUM_WARM_UPS: Final = 5
_GREEDY: Final = SamplingParams(temperature=0.0)
_BY_THE_HOST: Final = SamplingParams(temperature=1.0, top_p=0.9)


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model with everything that a worker computes with.

    Attributes:
      runner: computes steps; device thread only.
      pool: the KV memory.
      ledger: leases of KV blocks.
      prefix_cache: index of kept blocks.
      fingerprint: workers with equal fingerprints can exchange KV and compute the same bits.
      key: what golden tokens depend on, beside the model's version.
      model_config: the model's shape.
      eos_token_ids: the model's end tokens.
      max_model_len: longest sequence, prompt and completion together.
      max_model_len_reason: what limits it.
      pace: token budget of a step, and how long a step takes.
      constraints: grammars of constrained decoding.
      gpu_memory: the process's GPU memory after the first steps; None on a CPU.
      adapters: digests of the adapters that rows may name.
    """

    runner: Runner
    pool: KVPool
    ledger: BlockLedger
    prefix_cache: PrefixCache
    fingerprint: str
    key: MeasurementKey
    model_config: ModelConfig
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_model_len_reason: str
    pace: Pace
    constraints: Constraints
    gpu_memory: GpuMemory | None = None
    adapters: frozenset[bytes] = frozenset()


def open_weights(model_dir: Path) -> Checkpoint:
    """Open the weights of a directory: safetensors or GGUF.

    Raises:
      ModelError: files are missing or broken.
    """
    if gguf_weights(model_dir) is not None:
        from .gguf_weights import GgufCheckpoint  # loads the gguf library only if needed

        return GgufCheckpoint(model_dir)
    return Checkpoint(model_dir)


def load_engine(
    model_dir: Path,
    config: EngineConfig,
    on_progress: Callable[[str, float], None],
    open_checkpoint: Callable[[Path], Checkpoint] = open_weights,
    find_golden: FindGolden | None = None,
) -> Engine:
    """Load a model. Blocking; run it on the device thread.

    Args:
      model_dir: a Hugging Face directory, or the directory of a GGUF file.
      config: settings of the engine.
      on_progress: called with (stage, share of it done) on the loading thread: `config`, `digest`,
        `kv_pool`, `weights`, `graphs` (where decode steps are captured), then `warm_up`.
      open_checkpoint: opens the directory's weights; benchmarks pass random weights.
      find_golden: returns the golden tokens to check the model against; None to skip the check.

    Raises:
      ModelError: the model is broken, unsupported, or computes other golden tokens.
      ConfigError: a setting cannot work with this model or this machine.
    """
    on_progress("config", 0.0)
    model_config, eos_token_ids = load_model_config(model_dir), load_eos_token_ids(model_dir)
    device, checkpoint = _device(config), open_checkpoint(model_dir)
    config = replace(config, device=str(device), dtype=dtype_for(config, checkpoint.dtype))
    backend = choose_backend(config, model_config, device.type)
    config = _with_form(config, backend, checkpoint)
    config, layout, max_model_len, reason = _sized(config, model_config, device)
    on_progress("digest", 0.0)
    snapshots = Snapshots(config.snapshots, checkpoint.files, is_on=open_checkpoint is open_weights)
    computed_by = arithmetic(backend, device, model_config)
    key = _key(backend, config, computed_by)
    fingerprint = _fingerprint(snapshots.weights_digest(), config, model_config, computed_by)
    on_progress("kv_pool", 0.0)
    pool = KVPool(layout, _num_blocks(config, layout), device, config.gpu.pinned_bytes)
    runner = build_runner(
        backend, model_config, checkpoint, pool, config, max_model_len, on_progress, snapshots
    )
    ledger = BlockLedger(pool.num_blocks, poison=pool if config.poison_freed_blocks else None)
    expected = None if find_golden is None else find_golden(key)
    on_progress("warm_up", 0.0)
    first_steps = _first_steps(backend, model_config, expected)
    pace = first_steps(runner, ledger, config, max_model_len, partial(on_progress, "warm_up"))
    on_progress("warm_up", 1.0)
    return Engine(
        runner,
        pool,
        ledger,
        _prefix_cache(config, ledger, pool, backend),
        fingerprint,
        key,
        model_config,
        eos_token_ids,
        max_model_len,
        reason,
        pace,
        _constraints(model_dir, model_config, eos_token_ids, config.masks),
        _gpu_memory(device),
        frozenset(digest_bytes(one.digest) for one in config.adapters),
    )


def _with_form(config: EngineConfig, backend: str, checkpoint: Checkpoint) -> EngineConfig:
    """Return the config with the weights' format: `dtype` unless quantised weights are used as
    stored."""
    as_they_are = backend == NATIVE.name and checkpoint.is_quantised
    return config if as_they_are else replace(config, weights=WeightFormat.DTYPE)


def _key(backend: str, config: EngineConfig, computed_by: str) -> MeasurementKey:
    """Return the key for golden tokens. It includes the shape of steps, unless the backend computes
    the same bits for every shape."""
    if not ALL_TRAITS[backend].is_path_invariant:
        computed_by += f",{config.block_size}-token-blocks,{config.max_num_seqs}-rows"
    return MeasurementKey(backend, config.chosen_dtype.value, computed_by)


def _sized(
    config: EngineConfig, model: ModelConfig, device: torch.device
) -> tuple[EngineConfig, KVLayout, int, str]:
    """Return the config with the pool's size, the pool's layout, the longest sequence, and what
    limits it."""
    layout = _layout(config, model)
    if config.kv_pool_bytes is None:
        adapter_bytes = adapter_numbers(config.adapters, model) * layout.dtype.itemsize
        config = with_pool_size(
            config, model, layout.bytes_per_block, _free_bytes(device), adapter_bytes
        )
    return config, layout, *fit_model_len(config, model, layout.bytes_per_block)


def _first_steps(backend: str, model: ModelConfig, expected: Expected | None) -> FirstSteps:
    """Return the function that runs a model's first steps and measures its pace.

    Args:
      backend: the backend's name.
      model: the model's shape.
      expected: golden tokens to check; None to skip the check.
    """
    is_native = backend == NATIVE.name
    usual: FirstSteps = try_out if is_native else warm_up
    if expected is None:
        return usual

    def check(
        runner: Runner,
        ledger: BlockLedger,
        config: EngineConfig,
        max_model_len: int,
        on_progress: Callable[[float], None],
    ) -> Pace:
        steps = GoldenSteps(runner, ledger, config.block_size, max_model_len, model)
        if is_native:
            # These steps load the same kernels as those of `try_out`, and take as long.
            return pace_of(expected.num_tokens, steps.check(expected), config)
        pace = usual(runner, ledger, config, max_model_len, on_progress)
        steps.check(expected)
        return pace

    return check


def _num_blocks(config: EngineConfig, layout: KVLayout) -> int:
    return (config.kv_pool_bytes or 0) // layout.bytes_per_block


def _device(config: EngineConfig) -> torch.device:
    try:
        device = torch.device(chosen_device(config))
    except RuntimeError:
        raise ConfigError(
            f"device is {config.device!r}; allowed: 'cpu', 'cuda', 'cuda:1' and so on"
        ) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is {config.device!r}, but torch sees no NVIDIA GPU here; use device 'cpu', or "
            "install the driver and a CUDA build of torch"
        )
    if device.type == "cuda":
        return _bound(device)
    return device


def _bound(device: torch.device) -> torch.device:
    """Make a GPU the calling thread's current device.

    Triton launches and CUDA events use the current device, not the device of their tensors. Each
    thread has its own current device, 0 at first.
    """
    index, count = device.index or 0, torch.cuda.device_count()
    require(index < count, "device", str(device), f"cuda:0 to cuda:{count - 1}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, or None if the system does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory_bytes()


def _gpu_memory(device: torch.device) -> GpuMemory | None:
    """Return this process's GPU memory, including weights and KV pool; None for a CPU."""
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    held = torch.cuda.memory_reserved(device) + CONTEXT_BYTES
    return GpuMemory(str(gpu.uuid), held, gpu.total_memory)


def _fingerprint(digest: str, config: EngineConfig, model: ModelConfig, who_computes: str) -> str:
    """Return a digest of everything that two workers must share before they exchange KV.

    It covers weights and layout, so that KV has the same meaning, and what the bits depend on, so
    that a retry on another worker or a cached prefix gives the same sequence.
    """
    return (
        f"{digest}:{model.digest}:{config.chosen_dtype}:weights={config.weights}:layers={model.num_layers}"
        f":kv_heads={model.num_kv_heads}:head_dim={model.head_dim}:block_size={config.block_size}"
        f":by={who_computes}" + adapters_mark(digest_bytes(one.digest) for one in config.adapters)
    )


def _layout(config: EngineConfig, model: ModelConfig) -> KVLayout:
    return KVLayout(
        model.num_layers,
        config.block_size,
        model.num_kv_heads,
        model.head_dim,
        TORCH_DTYPES[config.chosen_dtype],
    )


def _constraints(
    model_dir: Path, model: ModelConfig, eos_token_ids: tuple[int, ...], config: MaskConfig
) -> Constraints:
    constraints = Constraints(model_dir / "tokenizer.json", model.vocab_size, eos_token_ids, config)
    constraints.prepare()
    return constraints


def _prefix_cache(
    config: EngineConfig, ledger: BlockLedger, pool: KVPool, backend: str
) -> PrefixCache:
    has_host_tier = config.prefix_cache and config.host_cache_bytes >= pool.bytes_per_block
    return PrefixCache(
        ledger,
        config.block_size,
        pool,
        host=HostTier(config.host_cache_bytes, pool.bytes_per_block) if has_host_tier else None,
        keeps_completions=ALL_TRAITS[backend].is_path_invariant,
        is_enabled=config.prefix_cache,
    )


@contextmanager
def _leased(ledger: BlockLedger, num_tokens: int, config: EngineConfig) -> Iterator[list[int]]:
    """Lease blocks for tokens of a measurement, not of a request.

    Raises:
      ConfigError: the pool leaves no memory for computing.
    """
    blocks = ledger.lease("warm-up", -(-num_tokens // config.block_size))
    try:
        yield blocks
    except CapacityError as error:
        raise ConfigError(
            f"kv_pool_bytes is {config.kv_pool_bytes} and leaves {config.device} no memory to "
            "compute in: lower it"
        ) from error
    finally:
        ledger.release("warm-up")


def warm_up(
    runner: Runner,
    ledger: BlockLedger,
    config: EngineConfig,
    max_model_len: int,
    on_progress: Callable[[float], None],
) -> Pace:
    """Run a step of every kind: prefill, decode, mixed, sampled on the device and on the host. The
    first step of a kind compiles and loads its kernels, which takes seconds. No request or
    heartbeat must wait for that.

    Args:
      runner: computes steps.
      ledger: leases of the pool, empty.
      config: sizes of steps.
      max_model_len: longest sequence.
      on_progress: called with the share of steps done.

    Returns:
      The pace, measured in the second prompt.

    Raises:
      ConfigError: the pool leaves no memory for computing.
    """
    num_prompt = max(1, min(MEASURED_TOKENS, config.max_num_batched_tokens, max_model_len - 1))
    num_tokens = min(num_prompt + 1, max_model_len)
    with _leased(ledger, num_tokens, config) as blocks:
        prompt = StepRow([0] * num_prompt, 0, blocks, SampleSpec(_GREEDY, 0))
        runner.step([prompt])
        on_progress(1 / _NUM_WARM_UPS)
        began_at = perf_counter()
        runner.step([prompt])
        elapsed_s = perf_counter() - began_at
        if num_tokens > num_prompt:
            for number, rows in enumerate(_decode_steps(num_prompt, blocks, config), start=2):
                on_progress(number / _NUM_WARM_UPS)
                runner.step(rows)
    return pace_of(num_prompt, elapsed_s, config)


def try_out(
    runner: Runner,
    ledger: BlockLedger,
    config: EngineConfig,
    max_model_len: int,
    on_progress: Callable[[float], None],
) -> Pace:
    """Time a prompt and decode steps after it, for backends whose kernels are already compiled. The
    first request may be waiting, and a longer warm-up would not save it any time.

    Args:
      runner: computes steps.
      ledger: leases of the pool, empty.
      config: sizes of steps.
      max_model_len: longest sequence.
      on_progress: called with the share of steps done.

    Returns:
      The pace.

    Raises:
      ConfigError: the pool leaves no memory for computing.
    """
    num_prompt = max(1, min(TRIED_TOKENS, config.max_num_batched_tokens, max_model_len - 1))
    num_tokens = min(num_prompt + 1, max_model_len)
    with _leased(ledger, num_tokens, config) as blocks:
        began_at = perf_counter()
        runner.step([StepRow([0] * num_prompt, 0, blocks, SampleSpec(_GREEDY, 0))])
        elapsed_s = perf_counter() - began_at
        on_progress(0.5)
        if num_tokens > num_prompt:
            specs = [SampleSpec(params, 1) for params in (_GREEDY, _BY_THE_HOST)]
            runner.step([StepRow([0], num_prompt, blocks, one, is_decode=True) for one in specs])
    return pace_of(num_prompt, elapsed_s, config)


def _decode_steps(
    num_prompt: int, blocks: list[int], config: EngineConfig
) -> Iterator[list[StepRow]]:
    """Yield steps with a decode row: plain, sampled on the host, and beside a prompt's chunk."""
    chunk = StepRow([0] * min(num_prompt, config.prompt_chunk_tokens), 0, blocks)
    for params, others in ((_GREEDY, []), (_BY_THE_HOST, []), (_GREEDY, [chunk])):
        yield [
            StepRow([0], num_prompt, blocks, SampleSpec(params, 1), is_decode=True),
            *others,
        ]

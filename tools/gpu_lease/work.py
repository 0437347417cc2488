"""Measure an engine in one process for the stages of `gpu_lease`: steps, prompts, KV, products.

Each measurement takes a `Scale`: real models on a GPU, or tiny ones on the CPU in a rehearsal.
"""

from __future__ import annotations

import gc
import gzip
import importlib.util
import json
import sys
import zlib
from collections import deque
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Final

import torch
from torch._C._autograd import DeviceType

from engine.batch import MAX_UNDER_WAY, SampleSpec, StepRow
from engine.kv_pool import KVLayout, KVPool
from engine.load import load_engine
from engine.model_config import load_model_config
from engine.weights import Checkpoint
from loadtest.bench.model import SHAPES, Shape, write_description, write_model
from transport.shared_ring import OwnRing
from triolet.config import Dtype, EngineConfig
from triolet.sampling import SamplingParams

from .pack import LEASE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from engine.batch import Sampled
    from engine.load import Engine

BYTES: Final = 2
"""Bytes of a bf16 number."""
GREEDY: Final = SamplingParams(temperature=0.0)
TOP_P: Final = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
WARM_UP_STEPS: Final = 8
JOIN_EVERY: Final = 4
"""Steps between two replaced rows: about as with 256 rows of 1,000 tokens each."""
BLOCK_SIZES: Final = {"triton": 16, "flash": 256, "sdpa": 16}
MAX_TRACE_BYTES: Final = 12 * 2**20
"""Largest trace that is returned from such a machine; a larger one is dropped, its table kept."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """A card's limits.

    Attributes:
      bytes_per_s: memory bandwidth.
      flops: dense bf16 operations per second.
    """

    bytes_per_s: float
    flops: float


KNOWN: Final = {
    "H200": Peaks(4.8e12, 989e12),
    "H100": Peaks(3.35e12, 989e12),
    "A100": Peaks(2.04e12, 312e12),
    "L40S": Peaks(0.864e12, 362e12),
    "L4": Peaks(0.3e12, 121e12),
}
"""Vendors' figures by card. The first entry whose name occurs in the card's name is used."""


def peaks_of(name: str) -> Peaks | None:
    """Return the limits of a card, or None if it is unknown."""
    return next((peaks for known, peaks in KNOWN.items() if known in name), None)


def num_parameters(shape: Shape) -> int:
    """Return the parameters that each token is multiplied with; a tied embedding counts once."""
    return sum(prod(size) for size in shape.tensors().values())


def decode_ceiling(shape: Shape, batch: int, context: int, peaks: Peaks | None) -> float | None:
    """Return the roofline of decode in tokens per second: reading weights and KV, or multiplying.
    None for an unknown card."""
    if peaks is None:
        return None
    num_bytes = num_parameters(shape) * BYTES + batch * context * shape.kv_bytes_per_token
    step_s = max(num_bytes / peaks.bytes_per_s, 2 * num_parameters(shape) * batch / peaks.flops)
    return batch / step_s


def prefill_ceiling(shape: Shape, peaks: Peaks | None) -> float | None:
    """Return the roofline of prefill in tokens per second: matrix products only. None for an
    unknown card."""
    return None if peaks is None else peaks.flops / (2 * num_parameters(shape))


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of all measurements, on a GPU or in a rehearsal.

    Attributes:
      device: torch device.
      backends: engine backends.
      sizes: names in `SHAPES`, by stage.
      batches: rows of decode steps, ascending.
      context: tokens of each row before the first step.
      steps: timed steps; a quarter of them with top_p.
      prompt_tokens: length of the prompt.
      chunk: prompt tokens per step.
      copy_bytes: size of the memory copy.
      side: side of the square product.
      kv_blocks: blocks shipped.
      streams: concurrent HTTP streams.
      stream_tokens: tokens of each stream's prompt and answer.
      requests: requests of `kills`, enough for a kill to hit some.
      cancels: cancels of `cancels`.
      serve: options of fleets.
      tests: files for pytest.
    """

    device: str
    backends: tuple[str, ...]
    sizes: dict[str, str]
    batches: tuple[int, ...]
    context: int
    steps: int
    prompt_tokens: int
    chunk: int
    copy_bytes: int
    side: int
    kv_blocks: int
    streams: int
    stream_tokens: tuple[int, int]
    requests: int
    cancels: int
    serve: tuple[str, ...]
    tests: tuple[str, ...]

    def finish(self) -> None:
        """Wait until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    @property
    def peaks(self) -> Peaks | None:
        """Limits of the card."""
        return peaks_of(torch.cuda.get_device_name()) if self.device == "cuda" else None


ON_GPU: Final = Scale(
    device="cuda",
    backends=("triton", "flash"),
    sizes={"small": "0.5b", "large": "8b"},
    batches=(1, 32, 128, 256),
    context=1024,
    steps=64,
    prompt_tokens=8192,
    chunk=2048,
    copy_bytes=2**30,
    side=8192,
    kv_blocks=128,
    streams=64,
    stream_tokens=(512, 256),
    requests=200,
    cancels=100,
    serve=("--device", "cuda", "--backend", "triton"),
    tests=("tests/engine/gpu/test_*.py", "tests/gpu/test_engine.py"),
)
IN_REHEARSAL: Final = Scale(
    device="cpu",
    backends=("sdpa",),
    sizes={"small": "15m", "large": "15m"},
    batches=(1, 4),
    context=32,
    steps=8,
    prompt_tokens=64,
    chunk=32,
    copy_bytes=2**20,
    side=64,
    kv_blocks=8,
    streams=4,
    stream_tokens=(16, 8),
    requests=40,
    cancels=20,
    serve=("--device", "cpu", "--threads", "1"),
    tests=("tests/engine/gpu/test_arena.py", "tests/engine/gpu/test_staging.py"),
)


def figure(case: str, engine: str, value: float, unit: str, ceiling: float | None = None) -> None:
    """Write a figure and its share of the card's roofline."""
    share = None if ceiling is None else round(value / ceiling, 3)
    row = {"case": case, "engine": engine, "value": round(value, 2), "unit": unit}
    sys.stdout.write(f"figure {json.dumps(row | {'share_of_roofline': share})}\n")
    sys.stdout.flush()


class DummyCheckpoint(Checkpoint):
    """A checkpoint of random weights, generated on the device, the same each time.

    Args:
      model_dir: a directory with a config.json.
    """

    def __init__(self, model_dir: Path) -> None:
        self.files = [model_dir / "config.json"]

    @property
    def dtype(self) -> str:
        """Nominal dtype of the weights."""
        return "BF16"

    def names(self) -> set[str]:
        """Return an empty set, so that no tensor counts as unused."""
        return set()

    def read(self, name: str, shape: tuple[int, ...], into: Tensor) -> None:
        """Fill a tensor: matrices with random numbers, norms with ones."""
        if len(shape) == 1:
            into.fill_(1.0)
            return
        generator = torch.Generator(into.device).manual_seed(zlib.crc32(name.encode()))
        into.normal_(0.0, 0.02, generator=generator)


def open_engine(scale: Scale, backend: str, model: Path, dtype: Dtype = Dtype.BFLOAT16) -> Engine:
    """Load a model, with random weights if it has none, and a pool for the largest batch."""
    block_size = BLOCK_SIZES[backend]
    shape = load_model_config(model)
    per_token = (
        2
        * shape.num_layers
        * shape.num_kv_heads
        * shape.head_dim
        * (BYTES if dtype is Dtype.BFLOAT16 else 2 * BYTES)
    )
    row_tokens = scale.context + scale.steps + WARM_UP_STEPS + 2 * block_size
    pool_tokens = max(scale.batches[-1] * row_tokens, scale.prompt_tokens) + 4 * block_size
    config = EngineConfig(
        dtype=dtype,
        backend=backend,
        device=scale.device,
        block_size=block_size,
        max_num_seqs=scale.batches[-1],
        max_num_batched_tokens=scale.chunk,
        max_model_len=min(scale.prompt_tokens, shape.max_model_len),
        kv_pool_bytes=per_token * pool_tokens,
    )
    has_weights = (model / "model.safetensors").exists()
    opened = Checkpoint if has_weights else DummyCheckpoint
    return load_engine(model, config, lambda stage, share: None, opened)


def described(shape: Shape, name: str) -> Path:
    """Return a directory with the config and tokenizer of a shape, and no weights."""
    directory = LEASE / f"shape-{name}"
    if not (directory / "tokenizer.json").exists():
        write_description(directory, shape)
    return directory


def written(size: str) -> Path:
    """Return a directory with weights on disk, for processes that read them themselves."""
    directory = LEASE / f"model-{size}"
    if not (directory / "tokenizer.json").exists():
        write_model(directory, SHAPES[size])
    return directory


def backends_of(scale: Scale) -> list[str]:
    """Return the backends that are installed."""
    has_flash = importlib.util.find_spec("flash_attn") is not None
    return [one for one in scale.backends if one != "flash" or has_flash]


def time_decode(
    scale: Scale, engine: Engine, batch: int, params: SamplingParams, *, ahead: int, joins: bool
) -> float:
    """Return the seconds of a decode step of rows with `context` tokens, after a warm-up.

    Args:
      scale: number of steps.
      engine: the engine; the content of its KV does not matter.
      batch: number of rows.
      params: sampling parameters.
      ahead: steps launched before an earlier one is read.
      joins: whether every fourth step replaces a row.
    """
    steps = scale.steps if params is GREEDY else max(JOIN_EVERY, scale.steps // 4)
    rows = _Rows(engine, batch, scale.context + scale.steps + WARM_UP_STEPS)
    try:
        rows.decode(scale.context, WARM_UP_STEPS, params, ahead=ahead, joins=joins)
        scale.finish()
        began_at = perf_counter()
        rows.decode(scale.context, steps, params, ahead=ahead, joins=joins)
        scale.finish()
        return (perf_counter() - began_at) / steps
    finally:
        rows.release()


class _Rows:
    """Decode rows and their leases."""

    def __init__(self, engine: Engine, batch: int, tokens: int) -> None:
        self._engine = engine
        self._num_blocks = -(-tokens // engine.pool.layout.block_size)
        self._tables = [engine.ledger.lease(row, self._num_blocks) for row in range(batch)]

    def decode(
        self, context: int, steps: int, params: SamplingParams, *, ahead: int, joins: bool
    ) -> None:
        under_way: deque[Callable[[], list[Sampled | None]]] = deque()
        began = [0] * len(self._tables)
        for step in range(steps):
            joined = self._replace(step) if joins and step % JOIN_EVERY == JOIN_EVERY - 1 else None
            if joined is not None:
                began[joined] = step
            rows = [
                StepRow(
                    [1],
                    context + step - began[index],
                    table,
                    SampleSpec(params, step - began[index]),
                    is_decode=True,
                    follows=index if under_way and index != joined else None,
                )
                for index, table in enumerate(self._tables)
            ]
            under_way.append(self._engine.runner.launch(rows))
            if len(under_way) > ahead:
                under_way.popleft()()
        for read in under_way:
            read()

    def _replace(self, step: int) -> int:
        index = (step // JOIN_EVERY) % len(self._tables)
        self._engine.ledger.release(index)
        self._tables[index] = self._engine.ledger.lease(index, self._num_blocks)
        return index

    def release(self) -> None:
        for row in range(len(self._tables)):
            self._engine.ledger.release(row)


def time_prefill(scale: Scale, engine: Engine) -> float:
    """Return prompt tokens per second of one long prompt in chunks, in the second run."""
    num_tokens = min(scale.prompt_tokens, engine.max_model_len)
    table = engine.ledger.lease("prompt", -(-num_tokens // engine.pool.layout.block_size))
    try:
        for _ in range(2):
            began_at = perf_counter()
            for start in range(0, num_tokens, scale.chunk):
                length = min(scale.chunk, num_tokens - start)
                engine.runner.step([StepRow([1] * length, start, table)])
            elapsed_s = perf_counter() - began_at
    finally:
        engine.ledger.release("prompt")
    return num_tokens / elapsed_s


def run_speed(scale: Scale, out: Path, stage: str) -> None:
    """Measure one model with each backend."""
    size = scale.sizes[stage]
    shape, peaks = SHAPES[size], scale.peaks
    model = described(shape, size)
    for backend in backends_of(scale):
        began_at = perf_counter()
        engine = open_engine(scale, backend, model)
        figure(f"{size} load, fill, capture", backend, perf_counter() - began_at, "s")
        for batch in scale.batches:
            ceiling = decode_ceiling(shape, batch, scale.context, peaks)
            for name, params, ahead, joins in (
                ("launched ahead", GREEDY, MAX_UNDER_WAY - 1, False),
                ("each read", GREEDY, 0, False),
                ("row joins every fourth step", GREEDY, MAX_UNDER_WAY - 1, True),
                ("top_p 0.9", TOP_P, 0, False),
            ):
                step_s = time_decode(scale, engine, batch, params, ahead=ahead, joins=joins)
                case = f"{size} decode b{batch} at {scale.context}"
                figure(case, f"{backend}, {name}", batch / step_s, "tokens/s", ceiling)
        speed = time_prefill(scale, engine)
        case = f"{size} prefill {scale.prompt_tokens}"
        figure(case, backend, speed, "tokens/s", prefill_ceiling(shape, peaks))
        del engine
        gc.collect()  # two pools of the larger model do not fit at once
        if scale.device == "cuda":
            torch.cuda.empty_cache()


def run_trace(scale: Scale, out: Path, stage: str) -> None:
    """Profile a few decode steps: write trace.json.gz for a viewer, and the largest kernels."""
    size, batch, steps = scale.sizes["small"], scale.batches[1], 12
    engine = open_engine(scale, scale.backends[0], described(SHAPES[size], size))
    time_decode(scale, engine, batch, GREEDY, ahead=1, joins=False)
    rows = _Rows(engine, batch, scale.context + scale.steps)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if scale.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        began_at = perf_counter()
        rows.decode(scale.context, steps, GREEDY, ahead=1, joins=False)
        scale.finish()
        elapsed_s = perf_counter() - began_at
    kind = "self_device_time_total" if scale.device == "cuda" else "self_cpu_time_total"
    events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, kind))
    # CPU events of a CUDA run repeat the time of the kernels that they launch.
    if scale.device == "cuda":
        events = [one for one in events if one.device_type == DeviceType.CUDA]
    total_us = sum(getattr(event, kind) for event in events)
    case = f"{size} decode b{batch}, {steps} steps"
    figure(f"{case}: device busy", "profiler", 100 * total_us / 1e6 / elapsed_s, "% of the time")
    for event in events[:10]:
        share = 100 * getattr(event, kind) / max(total_us, 1e-9)
        figure(f"{case}: {event.key[:80]}", "profiler", share, "% of the device's time")
    plain = out / "trace.json"
    profiler.export_chrome_trace(str(plain))
    packed = gzip.compress(plain.read_bytes())
    plain.unlink()
    if len(packed) <= MAX_TRACE_BYTES:
        (out / "trace.json.gz").write_bytes(packed)
    figure("size of trace.json.gz", "profiler", len(packed) / 2**20, "MiB")


def run_limits(scale: Scale, out: Path, stage: str) -> None:
    """Measure the card's limits, and which batch sizes give the same bits."""
    peaks, device = scale.peaks, scale.device
    source = torch.empty(scale.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    speed = 2 * scale.copy_bytes / _best_s(scale, lambda: target.copy_(source)) / 1e9
    figure(
        "memory copy, read and written",
        "torch",
        speed,
        "GB/s",
        None if peaks is None else peaks.bytes_per_s / 1e9,
    )
    left, right = (torch.randn(scale.side, scale.side, device=device).bfloat16() for _ in range(2))
    flops = 2 * scale.side**3 / _best_s(scale, lambda: left @ right) / 1e12
    most = None if peaks is None else peaks.flops / 1e12
    figure(f"product of {scale.side}", "torch", flops, "TFLOP/s", most)
    shape = SHAPES[scale.sizes["large"]]
    hidden, keys = shape.hidden_size, shape.num_kv_heads * shape.head_dim
    queries = shape.num_heads * shape.head_dim
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for name, outputs, inputs in (
        ("qkv", queries + 2 * keys, hidden),
        ("down", hidden, shape.intermediate_size),
    ):
        agreeing = sizes_that_agree(device, outputs, inputs, sizes)
        case = f"{name}: numbers of rows with the bits of {sizes[-1]}: {agreeing}"
        figure(case, "torch", len(agreeing), f"of {len(sizes)}")


def sizes_that_agree(device: str, outputs: int, inputs: int, sizes: tuple[int, ...]) -> list[int]:
    """Return the numbers of rows for which every row of a product has the largest batch's bits."""
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs, device=device).bfloat16() * 0.02
    rows = torch.randn(sizes[-1], inputs, device=device).bfloat16()
    expected = torch.nn.functional.linear(rows, weight)
    agreeing = []
    for size in sizes:
        actual = torch.nn.functional.linear(rows[:size], weight)
        turned = torch.nn.functional.linear(rows[:size].flip(0), weight).flip(0)
        if torch.equal(actual, expected[:size]) and torch.equal(actual, turned):
            agreeing.append(size)
    return agreeing


def _best_s(scale: Scale, work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        scale.finish()
        began_at = perf_counter()
        work()
        scale.finish()
        times.append(perf_counter() - began_at)
    return min(times)


def run_staging(scale: Scale, out: Path, stage: str) -> None:
    """Ship KV through two registered rings in turn, and copy blocks right after their import.

    Raises:
      RuntimeError: bytes changed in transit.
    """
    layout = KVLayout(32, 16, 8, 128, torch.bfloat16)
    pool = KVPool(layout, 2 * scale.kv_blocks + 2, torch.device(scale.device), 32 * 2**20)
    chunk = 4
    blocks = list(range(1, scale.kv_blocks + 1))
    for _ in range(2):  # the second ring may have the first one's address
        ring = OwnRing(chunk * pool.bytes_per_block)
        figure("ring is pinned", scale.device, pool.pin(ring.memory), "1: yes")
        torch.ones(1, device=scale.device).sum().item()  # raises a latched error, if any
        out_s, in_s = _ship(pool, blocks, ring.memory, chunk)
        pool.unpin(ring.memory)
        ring.close()
        num_bytes = len(blocks) * pool.bytes_per_block
        figure("KV out of the pool, 8b", scale.device, num_bytes / out_s / 1e9, "GB/s")
        figure("KV into the pool, 8b", scale.device, num_bytes / in_s / 1e9, "GB/s")
    wrong = _copies_that_differ(pool, blocks)
    figure("imported and copied at once: wrong blocks", scale.device, wrong, "0: right")
    if wrong:
        raise RuntimeError(f"{wrong} blocks were copied before they had arrived")


def _ship(pool: KVPool, blocks: list[int], ring: memoryview, chunk: int) -> tuple[float, float]:
    out_s = in_s = 0.0
    pool.blocks[blocks[0]].normal_()
    for first in range(0, len(blocks), chunk):
        some = blocks[first : first + chunk]
        began_at = perf_counter()
        payload = pool.export_blocks(some, ring[: len(some) * pool.bytes_per_block])
        out_s += perf_counter() - began_at
        began_at = perf_counter()
        pool.import_blocks(some, payload)
        pool.await_imports()
        pool.finish_writes()
        in_s += perf_counter() - began_at
        if bytes(pool.export_blocks(some)) != bytes(payload):
            raise RuntimeError(f"KV of blocks {some} changed in transit")
    return out_s, in_s


def _copies_that_differ(pool: KVPool, blocks: list[int]) -> int:
    """Repeatedly import a block behind a queue of others and copy it immediately. Return the
    wrong copies."""
    wrong = 0
    target = blocks[-1] + 1
    queued = pool.export_blocks(blocks[:-1])
    for turn in range(16):
        payload = bytes([turn + 1]) * pool.bytes_per_block
        pool.import_blocks(blocks[:-1], queued)
        pool.import_blocks([blocks[-1]], payload)
        pool.copy_block(blocks[-1], target)
        pool.await_imports()
        pool.finish_writes()
        wrong += bytes(pool.export_blocks([target])) != payload
    return wrong

"""Settings of the workers: engine, device, KV pool, speculation, each beside its reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from ..units import GIB, KIB, MIB, MILLISECONDS, SECONDS
from .adapters import AdapterConfig  # noqa: TC001 (get_type_hints reads the annotations)
from .limits import Count, CountOrZero, NotNegative, Positive, Share, require
from .link import MAX_LENDERS, LinkConfig


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """How a worker uses its GPU."""

    cuda_graphs: bool = True
    """Capture decode steps once for each size of batch and replay them; `triton` and `flash` only.
    Off, every kernel is launched by itself: slower, and easier to look into."""
    fixed_batch: bool = False
    """Pad every decode step to `max_num_seqs` rows. Matrix products choose their kernel by the
    number of rows, so that a token's last bits may depend on how many others are in the step; with
    one number they cannot. Costs what the padding costs."""
    pinned_bytes: Count = 32 * MIB
    """Host memory through which KV enters the pool: two windows (`kv_window_bytes`) of chunks whose
    copies may be under way. What leaves goes straight into a prefill worker's ring."""


NO_GUESSES: Final = "off"


LOOKUP: Final = "lookup"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Where decode gets guesses of coming tokens from, and how many it makes.

    A guess is computed in the same step as the token before it, and kept if it is the token that
    would have been chosen anyway. So answers are the same with and without; only speed differs.
    """

    source: str = NO_GUESSES
    """`off`; `lookup`, what followed the last tokens where they occurred before; or the directory
    of a draft model with the same vocabulary. Off by default: guesses that fail cost time."""
    max_guesses: Annotated[int, Meta(ge=1, le=64)] = 8
    """Of one sequence in one step, which then takes up to a fifth longer. A sequence is given so
    many only while all of them hold."""
    max_step_tokens: Annotated[int, Meta(ge=2, le=4096)] = 16
    """Rows and guesses of a step together, or rows and further tokens of replays, guesses or not.
    On a CPU a step of 8 rows took 1.0 to 1.2 times as long as one of a single row, 16 rows 1.2 to 2
    times, 32 rows 2.8 to 3.7 times: up to here it is bound by reading weights. A step with as many
    sequences carries no guesses."""
    min_ngram: Count = 2
    """Lookup: so many last tokens must have occurred before. One alone occurs everywhere."""
    max_ngram: int = 8
    """Lookup: of several places, that with the longest common past is taken; a longer one than
    this says no more."""
    max_lookback_tokens: int = 16_384
    """Lookup: older tokens are not looked at, so that a search takes a tenth of a millisecond at
    most where nothing is found."""
    min_acceptance: float = 0.2
    """Share of the guesses of a sequence, as a moving average, below which guessing does not pay
    for it."""
    pause_rows: Count = 16
    """How many rows a sequence then goes without guesses, before it tries a single one again."""
    max_pause_rows: int = 256
    """The pause doubles with each trial that fails, up to this."""
    draft_pool_bytes: Count = 128 * MIB
    """KV pool of the draft model, whose tokens are a fraction of the model's. A sequence that does
    not fit goes without guesses."""
    draft_chunk_tokens: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Prompt tokens that the draft model computes before one step: every stream's next token waits
    for them."""

    def __post_init__(self) -> None:
        for name, most in (("min_ngram", self.max_ngram), ("pause_rows", self.max_pause_rows)):
            value = getattr(self, name)
            require(value <= most, name, value, f"1 to {most}")

    @property
    def draft_dir(self) -> str | None:
        """The directory of the draft model, if that is where guesses come from."""
        return None if self.source in (NO_GUESSES, LOOKUP) else self.source


OFF: Final = SpeculationConfig()


@dataclass(frozen=True, slots=True)
class LendingConfig:
    """One worker among several that have shared out the cores of a machine evenly.

    A worker without work lends its cores to the others, for a step at a time.
    """

    path: str
    """A file in which they tell one another by locks, so that nothing is left of a dead one."""
    place: int
    """Its own, from 0."""
    places: int
    """How many there are."""

    def __post_init__(self) -> None:
        require(
            0 <= self.place < self.places <= MAX_LENDERS,
            "lending",
            f"place {self.place} of {self.places}",
            f"0 to one less than their number, which is at most {MAX_LENDERS}",
        )


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Dynamic batching of inputs on a prefill worker."""

    max_batch_tokens: Count = 4096
    """Tokens of one batch; a step's own budget counts too. 1 computes inputs one by one."""
    max_wait_s: Annotated[float, Meta(ge=0, le=1)] = 3 * MILLISECONDS
    """How long an idle worker waits for company for an input: concurrent clients' next requests
    come within about so much after the answers to their last. A full batch does not wait."""


@dataclass(frozen=True, slots=True)
class MaskConfig:
    """Bounds on what a worker spends to follow grammars. Times are of the processor, so that a busy
    machine ends no completion; only `*_wait_s` are by the clock."""

    compile_cpu_s: float = 200 * MILLISECONDS
    """For compiling one grammar: four times what the check before the queue allows, for a worker
    may have a slower core. Beyond it the grammar is too costly."""
    step_wait_share: float = 0.5
    """A step waits for masks that are still missing for at most this share of its own computing:
    rows without a grammar have gaps of at most 1.5 steps. A row with a late mask computes its
    token again with the next step."""
    least_wait_s: float = 2 * MILLISECONDS
    """The same, at least: a mask takes some 0.1 ms, but its thread has to wake. Steps of slow
    sequences alone wait no longer either, since a new stream's second token waits for such a
    step."""
    launched_wait_s: float = 10 * MILLISECONDS
    """The same for steps that are launched and not timed: about a step of a GPU."""
    slow_mask_cpu_s: float = 2 * MILLISECONDS
    """A sequence with a mask that took longer has its next ones computed in the slow thread, where
    it delays its like alone, and steps with other rows do not wait for it at all."""
    slow_niceness: int = 5
    """Of the slow thread: that of the device's (`EngineConfig.niceness`). No more, for it holds the
    interpreter's lock at times, and the device waits for the thread that holds that."""
    straggler_niceness: int = 10
    """Of a thread that only ends a mask of an ended sequence."""
    mask_cpu_s: float = 100 * MILLISECONDS
    """For one mask; beyond it the sequence ends, without waiting for the mask. The library's bounds
    are looked at between two rows of a parse, and one row may take long."""
    burst_cpu_s: float = 500 * MILLISECONDS
    """For all masks of a sequence, on top of `token_cpu_s` per token."""
    token_cpu_s: float = 4 * MILLISECONDS
    """For all masks of a sequence, per token of its completion; real ones take 0.1 ms, and 3 ms in
    the worst place of the widest objects."""
    replay_cpu_s: float = 10 * MILLISECONDS
    """Of one turn in which tokens that the client has already are followed; the rest comes in the
    sequence's next turns, so that others get theirs between."""
    max_stragglers: int = 4
    """Threads that may be left to end masks of ended sequences: a mask cannot be broken
    off. With so many, a thread that hangs is not replaced before one of them ends."""


MAX_NUM_SEQS: Final = 4096
"""A step's tokens travel in one frame per server, which has at most this many rows."""


class Dtype(StrEnum):
    """What weights, activations and KV are computed and stored in."""

    AUTO = "auto"
    """The checkpoint's own: bfloat16 for bfloat16, float16 and quantised weights, else float32."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class WeightFormat(StrEnum):
    """What weights are kept in."""

    AUTO = "auto"
    DTYPE = "dtype"


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """Weights as the `native` kernels read them, kept in files between starts."""

    keep: bool = True
    """A worker maps them instead of packing the weights again, and workers of one model have them
    in memory once."""
    folder: str | None = None
    """None is `$XDG_CACHE_HOME/triolet/packed`. No other user may write there."""
    max_bytes: CountOrZero = 32 * GIB
    """Of all snapshots: a write beyond it removes the least recently used ones that no process has
    mapped. Two of an 8B model in bfloat16."""
    min_bytes: CountOrZero = 64 * MIB
    """Weight files below this size are packed at each start, which takes less than 0.1 s."""


AUTO_BACKEND: Final = "auto"
"""The name of no backend, but of whichever is best here."""


AUTO_DEVICE: Final = "auto"
"""A GPU where there is one that torch and the backend can use, else the CPU."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a worker computes with."""

    dtype: Dtype = Dtype.AUTO
    """`auto` takes the checkpoint's own; float16 becomes bfloat16. Quantised weights (of a GGUF
    file) are computed in bfloat16: what they lost exceeds its rounding, and it halves the memory
    that decode waits for."""
    weights: WeightFormat = WeightFormat.AUTO
    """`auto` computes quantised weights (Q4_0 to Q8_0, Q4_K to Q6_K) as they are, where the
    `native` kernels compute: a quarter of bfloat16's memory, which decode waits for. Activations
    are rounded to 8 bits there. `dtype` widens them to `dtype`, as all others are."""
    backend: str = AUTO_BACKEND
    """What computes: `native` kernels on a CPU, `sdpa` (torch) anywhere, `triton` on NVIDIA,
    `flash` the same with flash-attn for prompts. `auto` is `native` where its kernels were built
    and fit machine and model, else `sdpa`."""
    device: str = AUTO_DEVICE
    """`cpu`, `cuda`, `cuda:N`, or `auto`: a GPU where there is one. Under `serve` `cuda` spreads
    the workers over all GPUs in turn, and `cuda:N` puts all of them on one."""
    block_size: Count = 16
    """Tokens per KV block. 16 wastes 8 tokens per sequence on average; `flash` needs 256."""
    kv_pool_bytes: Count | None = None
    """KV pool of one worker. None sizes it from the model: the KV of `max_num_seqs` sequences of
    `kv_pool_context_share` of the model's context (at least `kv_pool_row_tokens`), at least one
    whole context, but never more than `kv_pool_memory_share` of the memory that is free on the
    device, less what the adapters of the worker take. Where that holds less than one context the
    context is cut to it, and a `max_model_len` that does not fit is refused."""
    kv_pool_context_share: Share = 0.0625
    """Share of the context for each of `max_num_seqs` sequences: 64 of them have four whole
    contexts. In a replay of real conversations, 64 at once held up to 1,577 tokens each (Azure,
    context 8,192), 1,393 (ShareGPT, 8,192) and 21,299 (Mooncake, 131,072): such a pool holds 20,
    23 and 24 of them, and a CPU gains little from more than 16 rows. 0.25 holds all 64, for a GPU
    or a cache of more prompts."""
    kv_pool_row_tokens: Count = 256
    """The least for each of these sequences, up to the context: a small context is a short prompt
    and its answer already, and is not divided further."""
    kv_pool_memory_share: Share = 0.25
    """Share of the device's free memory for a pool that is sized from the model. `serve` has two
    workers by default: half of the memory stays for two copies of the weights and for computing.
    With more workers `serve` divides that half among them."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=MAX_NUM_SEQS)] = 64
    """Rows of a decode step; more rows gain little once the step is bound by compute."""
    target_step_s: Positive = 50 * MILLISECONDS
    """How long a prefill step should take: a cancel (which may take 100 ms in all), a short prompt
    and the progress that a heartbeat shows wait for it. Each worker times itself at its start, and
    its budget of tokens follows what its steps take from then on."""
    max_num_batched_tokens: int = 512
    """Prompt tokens per prefill step: the bound on how long a short prompt waits for a long one."""
    prompt_chunk_tokens: Count = 64
    """Prompt tokens in a decode step beside running streams, where decode computes prompts itself:
    what they may wait for. Fewer hardly shorten the step, for the weights are read all the same."""
    max_model_len: int | None = None
    """Context length; None takes the model's own."""
    threads: Count | None = None
    """CPU threads of the device thread's kernels; None divides the cores among local workers."""
    niceness: Annotated[int, Meta(ge=0, le=19)] = 5
    """Of the device's threads on the CPU: threads that move bytes (a cancel, a heartbeat, a token)
    go before those that compute where both want the same core, which is a few per cent of the
    time."""
    prefix_cache: bool = True
    """Keep the KV of finished blocks in memory that no attempt leases, for prompts that begin
    alike. It gives way before anybody is refused or preempted, so it costs nothing."""
    host_cache_bytes: CountOrZero = 0
    """Host memory of each worker for KV that gave way: a hit copies it back into the pool. None by
    default, because on a CPU the pool itself lies in host memory: raise `kv_pool_bytes` there."""
    max_waiting_steps: int = 2
    """Calls that may wait for the device thread behind the running one: one step ahead keeps it
    busy, and whatever is decided later is decided better."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    masks: MaskConfig = field(default_factory=MaskConfig)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    adapters: tuple[AdapterConfig, ...] = ()
    """LoRA adapters that rows may name; filled in from those of the model."""
    max_adapters: CountOrZero = 32
    """LoRA adapters of one model. All of them stay in memory beside its weights: at rank 16 one
    takes about 130 MB for a model of 8B in bfloat16, and 32 of them 4 GB."""
    max_adapter_rank: Count = 64
    """The largest rank of a LoRA adapter; adapters are mostly trained with 8 to 64. What a row's
    adapter adds to its step rises with the rank."""
    poison_freed_blocks: bool = False
    """Fill freed blocks with NaN, and let an audit look whether they stay so: how tests find a
    write by another than the owner, and a read beyond a sequence. Costs a write per freed
    block, and an audit reads the whole pool."""
    close_timeout_s: float = 5.0 * SECONDS
    """How long leaving waits for the running step; longer than any step but a wedged one."""

    @property
    def chosen_dtype(self) -> Dtype:
        """`dtype`, or float32 where it is still open."""
        return Dtype.FLOAT32 if self.dtype is Dtype.AUTO else self.dtype

    def __post_init__(self) -> None:
        require(
            self.max_num_batched_tokens >= self.block_size,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f">= block_size ({self.block_size})",
        )


LABEL: Final = re.compile(r"[A-Za-z0-9._-]{1,63}")
"""A label's value, as Kubernetes allows it."""


@dataclass(frozen=True, slots=True)
class LabelsConfig:
    """Where a worker runs and what it costs; servers show it in `/fleet/status`. Each is empty, or
    up to 63 letters, digits, `-`, `_` and `.`."""

    zone: str = ""
    """Power and network that fail together."""
    host: str = ""
    """The machine."""
    pool: str = ""
    """Machines that are bought or scaled together."""
    price_class: str = ""
    """Machines that cost the same."""
    preemptible: bool = False
    """Whether the provider may take the machine away."""

    def __post_init__(self) -> None:
        for name, value in self.told.items():
            allowed = "up to 63 letters, digits, -, _ and ."
            require(LABEL.fullmatch(value) is not None, name, value, allowed)

    @property
    def told(self) -> dict[str, str]:
        """Those that are set, as they travel."""
        values = {
            "zone": self.zone,
            "host": self.host,
            "pool": self.pool,
            "price_class": self.price_class,
            "preemptible": "true" if self.preemptible else "",
        }
        return {name: value for name, value in values.items() if value}


LABEL_NAMES: Final = frozenset(one.name for one in fields(LabelsConfig))


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Bounds of the answers to probes, which are read from memory."""

    max_head_bytes: Count = 4 * KIB
    """Of a request with its headers; a probe's has some hundred bytes."""
    deadline_s: Positive = 1.0 * SECONDS
    """For one probe, from its connection to its answer: Kubernetes waits for as long."""
    max_connections: Count = 8
    """Probes that are answered at once; further ones wait in the kernel, as many again."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One prefill or decode process."""

    name: str = ""
    """Name in the fleet and in metrics; empty for role and process id."""
    model_dir: str = ""
    """Absolute path of the model; filled in from `fleet.model`."""
    model_digest: str = ""
    """sha256:… of the model's version in the store; empty for a directory that is not in one."""
    compute_digest: str = ""
    """sha256:… of the part of the version that decides bits: workers and servers with the same one
    work together. Empty for a directory that is in no store."""
    model_store: str = ""
    """Folder of that store, where the version's golden tokens are."""
    control_address: str = ""
    """Where servers reach this worker: `ipc://…` or `tcp://host:port`."""
    kv_address: str | None = None
    """Decode only: where prefill workers reach it."""
    advertised_kv_address: str | None = None
    """Decode only: what it tells them instead, where they see another address than the one that can
    be bound here: behind NAT, or in a container with published ports."""
    health_address: str = ""
    """Where probes are answered: `ipc://PATH` in a private directory, or `tcp://HOST:PORT` for
    probes from outside its container, which every process that reaches the port may ask; empty for
    nowhere."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """Bounds of these answers."""
    labels: LabelsConfig = field(default_factory=LabelsConfig)
    """Where it runs and what it costs."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lending: LendingConfig | None = None
    """The workers with which it shares idle cores; None for none."""
    curve_dir: str | None = None
    """Key directory; required for any tcp address."""
    max_waiting_tokens: int = 32_768
    """Prefill only: prompt tokens that may wait inside the worker. So few that fairness, deadlines
    and cancellation act in the server; this much keeps the device busy for a round trip."""
    step_timeout_s: float = 60.0 * SECONDS
    """A device step longer than this is a wedged device: the worker exits and is restarted."""
    drain_timeout_s: NotNegative = 30.0 * SECONDS
    """After SIGTERM running sequences may finish for this long; the server's own bound."""

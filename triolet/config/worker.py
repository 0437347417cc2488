"""Settings of workers: engine, device, KV pool, speculation; each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta

from ..units import GIB, KIB, MIB, MILLISECONDS, SECONDS
from .adapters import AdapterConfig  # noqa: TC001 (get_type_hints reads the annotations)
from .limits import LABEL, Count, CountOrZero, NotNegative, Positive, Share, require
from .link import MAX_LENDERS, LinkConfig
from .membership import RegistrationConfig


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """How a worker uses its GPU."""

    cuda_graphs: bool = True
    """Capture decode steps once per batch size and replay them; `triton` and `flash` only. If off,
    every kernel is launched separately: slower, but easier to debug."""
    fixed_batch: bool = False
    """Pad every decode step to `max_num_seqs` rows. Matrix products choose their kernel by the
    number of rows, so a token's last bits may depend on how many others are in the step; with a
    fixed number they do not. Costs the computing of the padding."""
    pinned_bytes: Count = 32 * MIB
    """Host memory through which KV enters the pool: two windows (`kv_window_bytes`) of chunks being
    copied. Outgoing KV is copied directly into a prefill worker's ring."""


NO_GUESSES: Final = "off"


LOOKUP: Final = "lookup"


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculative decoding: where guesses of coming tokens come from, and how many are made.

    A guess is computed in the same step as the token before it, and kept if it equals the token
    that would have been chosen anyway. So the answers are the same; only the speed differs.
    """

    source: str = NO_GUESSES
    """`off`; `lookup`, which repeats what followed the last tokens where they occurred before; or
    the directory of a draft model with the same vocabulary. Off by default: wrong guesses cost
    time."""
    max_guesses: Annotated[int, Meta(ge=1, le=64)] = 8
    """Guesses for one sequence in one step, which then takes up to a fifth longer. A sequence gets
    this many only while all of them are right."""
    max_step_tokens: Annotated[int, Meta(ge=2, le=4096)] = 16
    """Rows and guesses of a step together, or rows and further tokens of replays. On a CPU a step
    of 8 rows took 1.0 to 1.2 times as long as one of a single row, 16 rows 1.2 to 2 times, 32 rows
    2.8 to 3.7 times: up to here it is bound by reading weights. A step with this many sequences
    carries no guesses."""
    min_ngram: Count = 2
    """Lookup: length of the match at the end of the sequence. A single token occurs everywhere."""
    max_ngram: int = 8
    """Lookup: of several places, the one with the longest match is taken; a match longer than this
    adds no information."""
    max_lookback_tokens: int = 16_384
    """Lookup: older tokens are not searched, so that a search without a result takes at most a
    tenth of a millisecond."""
    min_acceptance: float = 0.2
    """Share of right guesses of a sequence (moving average) below which guessing does not pay."""
    pause_rows: Count = 16
    """Rows that the sequence then runs without guesses before it tries a single one."""
    max_pause_rows: int = 256
    """The pause doubles with each failed trial, up to this."""
    draft_pool_bytes: Count = 128 * MIB
    """KV pool of the draft model, which needs less KV per token than the model. A sequence that
    does not fit gets no guesses."""
    draft_chunk_tokens: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Prompt tokens that the draft model computes before one step: every stream's next token waits
    for them."""

    def __post_init__(self) -> None:
        for name, most in (("min_ngram", self.max_ngram), ("pause_rows", self.max_pause_rows)):
            value = getattr(self, name)
            require(value <= most, name, value, f"1 to {most}")

    @property
    def draft_dir(self) -> str | None:
        """Directory of the draft model, if guesses come from one."""
        return None if self.source in (NO_GUESSES, LOOKUP) else self.source


OFF: Final = SpeculationConfig()


@dataclass(frozen=True, slots=True)
class LendingConfig:
    """Settings of one of several workers that divide a machine's cores evenly.

    A worker without work lends its cores to the others, one step at a time.
    """

    path: str
    """File with locks through which they coordinate, so that a dead worker leaves nothing
    behind."""
    place: int
    """Its own number, from 0."""
    places: int
    """Number of workers."""

    def __post_init__(self) -> None:
        require(
            0 <= self.place < self.places <= MAX_LENDERS,
            "lending",
            f"place {self.place} of {self.places}",
            f"0 to one less than places, which is at most {MAX_LENDERS}",
        )


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """Dynamic batching of embedding inputs on a prefill worker."""

    max_batch_tokens: Count = 4096
    """Tokens of one batch, within a step's own budget. 1 computes inputs one by one."""
    max_wait_s: Annotated[float, Meta(ge=0, le=1)] = 3 * MILLISECONDS
    """How long an idle worker waits for more inputs: concurrent clients send their next requests
    about this long after the answers. A full batch does not wait."""


@dataclass(frozen=True, slots=True)
class MaskConfig:
    """Bounds on a worker's time for grammars. Times are CPU times, so that a busy machine ends no
    completion; only `*_wait_s` are wall-clock times."""

    compile_cpu_s: float = 200 * MILLISECONDS
    """For compiling one grammar: four times the limit of the check before the queue, because a
    worker may have a slower core. Beyond this the grammar is too costly."""
    step_wait_share: float = 0.5
    """A step waits for missing masks for at most this share of its own computing: rows without a
    grammar have gaps of at most 1.5 steps. A row with a late mask computes its token again in the
    next step."""
    least_wait_s: float = 2 * MILLISECONDS
    """Minimum of this wait: a mask takes about 0.1 ms, but its thread has to wake up. Steps with
    only slow sequences do not wait longer either, because a new stream's second token waits for
    such a step."""
    launched_wait_s: float = 10 * MILLISECONDS
    """Wait for masks in steps that are launched without timing: about one step of a GPU."""
    slow_mask_cpu_s: float = 2 * MILLISECONDS
    """After a mask that took longer, a sequence's next ones are computed in the slow thread, where
    they delay only other slow sequences; steps with other rows do not wait for them."""
    slow_niceness: int = 5
    """Niceness of the slow thread: as of the device's threads (`EngineConfig.niceness`). Not more,
    because it sometimes holds the interpreter's lock, for which the device waits."""
    straggler_niceness: int = 10
    """Niceness of a thread that only finishes a mask of an ended sequence."""
    mask_cpu_s: float = 100 * MILLISECONDS
    """CPU time of one mask. Beyond this the sequence ends without waiting for the mask. The library
    checks its own limits only between two rows of a parse, and one row may take long."""
    burst_cpu_s: float = 500 * MILLISECONDS
    """CPU time of all masks of a sequence, in addition to `token_cpu_s` per token."""
    token_cpu_s: float = 4 * MILLISECONDS
    """CPU time of all masks of a sequence per completion token. Real ones take 0.1 ms, and 3 ms at
    the worst place of the widest objects."""
    replay_cpu_s: float = 10 * MILLISECONDS
    """CPU time of one turn that replays tokens the client already has. The rest follows in the
    next turns, so that others get theirs in between."""
    max_stragglers: int = 4
    """Threads that may still be finishing masks of ended sequences: a mask cannot be interrupted.
    At this number, a thread that hangs is replaced only once one of them ends."""


MAX_NUM_SEQS: Final = 4096
"""One frame per server carries a step's tokens, and it has at most this many rows."""


class Dtype(StrEnum):
    """Data type of weights, activations and KV."""

    AUTO = "auto"
    """The checkpoint's: bfloat16 for bfloat16, float16 and quantised weights, else float32."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class WeightFormat(StrEnum):
    """Format of the weights in memory."""

    AUTO = "auto"
    DTYPE = "dtype"


@dataclass(frozen=True, slots=True)
class SnapshotConfig:
    """Packed weights for the `native` kernels, kept in files between starts."""

    keep: bool = True
    """A worker maps them instead of packing the weights again, and workers of one model share them
    in memory."""
    folder: str | None = None
    """None means `$XDG_CACHE_HOME/triolet/packed`. No other user may write there."""
    max_bytes: CountOrZero = 32 * GIB
    """Total size of snapshots: two of an 8B model in bfloat16. A write beyond it removes the least
    recently used ones that no process has mapped."""
    min_bytes: CountOrZero = MIB
    """Smaller weight files are packed into each worker's own memory at each start, which takes
    milliseconds. The demo model is larger: its workers share one copy."""


AUTO_BACKEND: Final = "auto"
"""Stands for the best backend available here."""


AUTO_DEVICE: Final = "auto"
"""A GPU if there is one that torch and the backend can use, else the CPU."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Model computation: data types, backend, device, KV pool, batch sizes."""

    dtype: Dtype = Dtype.AUTO
    """`auto` takes the checkpoint's; float16 becomes bfloat16. Quantised weights (of a GGUF file)
    are computed in bfloat16: their quantisation error exceeds its rounding, and it halves the
    memory that decode reads."""
    weights: WeightFormat = WeightFormat.AUTO
    """`auto` computes quantised weights (Q4_0 to Q8_0, Q4_K to Q6_K) without widening them, if the
    `native` kernels run: they read a quarter of bfloat16's memory. Activations are then rounded to
    8 bits. `dtype` widens them to `dtype`, as all other weights."""
    backend: str = AUTO_BACKEND
    """`native` kernels on a CPU, `sdpa` (torch) anywhere, `triton` on NVIDIA, `flash` the same with
    flash-attn for prompts. `auto` is `native` if its kernels are built and fit machine and model,
    else `sdpa`."""
    device: str = AUTO_DEVICE
    """`cpu`, `cuda`, `cuda:N`, or `auto`: a GPU if there is one. Under `serve`, `cuda` distributes
    the workers over all GPUs, and `cuda:N` puts all of them on one."""
    block_size: Count = 16
    """Tokens per KV block. 16 wastes 8 tokens per sequence on average; `flash` needs 256."""
    kv_pool_bytes: Count | None = None
    """KV pool of one worker. None derives it from the model: the KV of `max_num_seqs` sequences of
    `kv_pool_context_share` of the model's context (at least `kv_pool_row_tokens`), at least one
    whole context, but at most `kv_pool_memory_share` of the device's free memory, less the worker's
    adapters. If that holds less than one context, the context is cut to it, and a larger
    `max_model_len` is refused."""
    kv_pool_context_share: Share = 0.0625
    """Share of the context for each of `max_num_seqs` sequences: 64 of them get four whole
    contexts. In a replay of real conversations, 64 at once held up to 1,577 tokens each (Azure,
    context 8,192), 1,393 (ShareGPT, 8,192) and 21,299 (Mooncake, 131,072): such a pool holds 20, 23
    and 24 of them, and a CPU gains little from more than 16 rows. 0.25 holds all 64, for a GPU or a
    larger prefix cache."""
    kv_pool_row_tokens: Count = 256
    """Minimum for each of these sequences, up to the context: a small context is needed whole for a
    short prompt and its answer."""
    kv_pool_memory_share: Share = 0.25
    """Share of the device's free memory for a pool derived from the model. `serve` has two workers
    by default: half of the memory remains for two copies of the weights and for computing. With
    more workers `serve` divides that half among them."""
    max_num_seqs: Annotated[int, Meta(ge=1, le=MAX_NUM_SEQS)] = 64
    """Rows of a decode step; more rows gain little once the step is bound by compute."""
    target_step_s: Positive = 50 * MILLISECONDS
    """Target length of a prefill step: cancels (which may take 100 ms in all), short prompts and
    the progress shown in heartbeats wait for it. Each worker times itself at its start and then
    adjusts its token budget to its measured steps."""
    max_num_batched_tokens: int = 512
    """Prompt tokens per prefill step: bounds how long a short prompt waits for a long one."""
    prompt_chunk_tokens: Count = 64
    """Prompt tokens in a decode step beside running streams, if decode computes prompts itself:
    bounds their wait. Fewer hardly shorten the step, because the weights are read anyway."""
    max_model_len: int | None = None
    """Context length; None takes the model's."""
    threads: Count | None = None
    """CPU threads for kernels; None divides the cores among local workers."""
    niceness: Annotated[int, Meta(ge=0, le=19)] = 5
    """Niceness of the device's CPU threads. Threads that move bytes (cancels, heartbeats, tokens)
    have priority over computing if both need the same core, which is a few per cent of the time."""
    prefix_cache: bool = True
    """Keep the KV of finished blocks in unleased memory for prompts with the same beginning. It is
    given up before any request is refused or preempted, so it costs nothing."""
    host_cache_bytes: CountOrZero = 0
    """Host memory of each worker for evicted KV: a hit copies it back into the pool. None by
    default, because on a CPU the pool is host memory itself: raise `kv_pool_bytes` there."""
    max_waiting_steps: int = 2
    """Calls that may wait for the device thread behind the running one: one step ahead keeps it
    busy, and later decisions are better ones."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    masks: MaskConfig = field(default_factory=MaskConfig)
    snapshots: SnapshotConfig = field(default_factory=SnapshotConfig)
    adapters: tuple[AdapterConfig, ...] = ()
    """LoRA adapters that rows may name; set from those of the model."""
    max_adapters: CountOrZero = 32
    """LoRA adapters of one model. All of them stay in memory with its weights: at rank 16 one takes
    about 130 MB for an 8B model in bfloat16, and 32 of them 4 GB."""
    max_adapter_rank: Count = 64
    """Largest rank of a LoRA adapter; most are trained with 8 to 64. The time that an adapter adds
    to a step grows with its rank."""
    poison_freed_blocks: bool = False
    """Fill freed blocks with NaN, and check in audits that they stay so: tests use it to find
    writes by another than the owner, and reads beyond a sequence. Costs a write per freed block,
    and an audit reads the whole pool."""
    close_timeout_s: float = 5.0 * SECONDS
    """How long shutdown waits for the running step; longer than any step that is not stuck."""

    @property
    def chosen_dtype(self) -> Dtype:
        """`dtype`, or float32 if it is still `auto`."""
        return Dtype.FLOAT32 if self.dtype is Dtype.AUTO else self.dtype

    def __post_init__(self) -> None:
        require(
            self.max_num_batched_tokens >= self.block_size,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f">= block_size ({self.block_size})",
        )


@dataclass(frozen=True, slots=True)
class LabelsConfig:
    """Where a worker runs and what it costs; shown in `/fleet/status`. Each is empty, or up to 63
    letters, digits, `-`, `_` and `.`."""

    zone: str = ""
    """Machines that share power and network, and fail together."""
    host: str = ""
    """The machine."""
    pool: str = ""
    """Pool: the worker serves only tenants and plans that name it. Empty for the shared pool."""
    price_class: str = ""
    """Machines with the same price."""
    preemptible: bool = False
    """Whether the provider may take the machine away."""

    def __post_init__(self) -> None:
        for name, value in self.told.items():
            allowed = "up to 63 letters, digits, -, _ and ."
            require(LABEL.fullmatch(value) is not None, name, value, allowed)

    @property
    def told(self) -> dict[str, str]:
        """The labels that are set, as sent to servers."""
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
    """Bounds of the answers to health probes, which come from memory."""

    max_head_bytes: Count = 4 * KIB
    """Maximum size of a request with its headers. A probe's takes a few hundred bytes."""
    deadline_s: Positive = 1.0 * SECONDS
    """For one probe, from connection to answer: Kubernetes waits equally long."""
    max_connections: Count = 8
    """Probes answered at once; as many again wait in the kernel."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One prefill or decode process."""

    name: str = ""
    """Name in the fleet and in metrics; empty means role and process id."""
    model_dir: str = ""
    """Absolute path of the model; set from `fleet.model`."""
    model_digest: str = ""
    """sha256:… of the model's version in the store; empty for a directory outside the store."""
    compute_digest: str = ""
    """sha256:… of the part of the version that determines the computed bits: workers and servers
    with the same one work together. Empty for a directory outside the store."""
    model_store: str = ""
    """Folder of that store, with the version's golden tokens."""
    control_address: str = ""
    """Where servers reach this worker: `ipc://…` or `tcp://host:port`."""
    kv_address: str | None = None
    """Decode only: where prefill workers reach it."""
    advertised_kv_address: str | None = None
    """Decode only: the address to announce instead, if prefill workers reach it differently: behind
    NAT, or in a container with published ports."""
    health_address: str = ""
    """Where probes are answered: `ipc://PATH` in a private directory, or `tcp://HOST:PORT` for
    probes from outside its container, open to every process that reaches the port; empty for
    nowhere."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """Bounds of these answers."""
    labels: LabelsConfig = field(default_factory=LabelsConfig)
    """Where it runs and what it costs."""
    membership: RegistrationConfig = field(default_factory=RegistrationConfig)
    """How servers find the worker, if they do not have its address."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lending: LendingConfig | None = None
    """Workers with which it shares idle cores; None for none."""
    curve_dir: str | None = None
    """Key directory; required for any tcp address."""
    max_waiting_tokens: int = 32_768
    """Prefill only: prompt tokens that may wait inside the worker. Few, so that fairness, deadlines
    and cancellation take effect in the server; enough to keep the device busy for a round trip."""
    step_timeout_s: float = 60.0 * SECONDS
    """A longer device step means that the device is stuck: the worker exits and is restarted."""
    drain_timeout_s: NotNegative = 30.0 * SECONDS
    """After SIGTERM running sequences may continue for this long; the server has the same limit."""

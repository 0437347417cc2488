"""Every bound, deadline and buffer size of the product, each beside its reason.

Knows numbers; refuses to read files, flags or the environment (ops/cli does). Each part of the
product is handed only the dataclass it needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from ipaddress import ip_network
from typing import Final

from .config_batches import BatchConfig
from .config_embedding import EmbeddingConfig, EmbeddingLimits
from .config_gpu import GpuConfig
from .config_grammar import GrammarConfig, MaskConfig
from .config_overload import OverloadConfig
from .config_queue import DoorConfig, QueueConfig, TurnsConfig
from .config_recovery import RecoveryConfig
from .config_response_cache import ResponseCacheConfig
from .config_resume import ResumeConfig
from .config_routing import RoutingConfig
from .config_siblings import LendingConfig, SiblingConfig  # noqa: TC001 (as its neighbours)
from .config_speculation import SpeculationConfig
from .config_tenants import TenantsConfig
from .config_wire import KvWire, WireConfig
from .errors import ConfigError
from .loopback import is_loopback
from .units import KIB, MIB, MILLISECONDS, SECONDS

MAX_NUM_SEQS: Final = 4096
"""A step's tokens travel in one frame per server, which has at most this many rows."""
MAX_AUDIT_LEASES: Final = 4096
"""Leases that a worker lists when it is audited, the oldest first: a megabyte, and a leaked one is
always among them. It says how many there are in all."""


class Dtype(StrEnum):
    """What weights, activations and KV are computed and stored in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class ReasoningParser(StrEnum):
    """How a model writes its reasoning."""

    AUTO = "auto"  # as the tokenizer's markers say
    NONE = "none"  # all is text
    QWEN3 = "qwen3"  # <think>…</think>, opened by the prompt or by the completion's first token
    DEEPSEEK_R1 = "deepseek_r1"  # the same; a completion begins within it, whatever the prompt says
    HARMONY = "harmony"  # channels of gpt-oss


class WeightFormat(StrEnum):
    """What weights are kept in."""

    DTYPE = "dtype"
    INT8 = "int8"


class ToolParser(StrEnum):
    """How a model writes calls of tools."""

    AUTO = "auto"  # as its chat template says, or its tokens
    HERMES = "hermes"  # JSON between <tool_call> tags: Hermes, Qwen and many others
    LLAMA = "llama"  # bare JSON: Llama 3
    MISTRAL = "mistral"  # JSON behind [TOOL_CALLS]
    QWEN3_CODER = "qwen3_coder"  # tags for each parameter
    PYTHONIC = "pythonic"  # [f(a=1)]: Llama 3.2 and 4
    HARMONY = "harmony"  # messages on channels: gpt-oss
    GRANITE = "granite"  # a JSON list behind <|tool_call|>
    PHI = "phi"  # the same with a closing token: Phi-4-mini


DAY_S = 86_400.0 * SECONDS


def require(is_allowed: bool, name: str, value: object, allowed: str) -> None:
    """Raise a ConfigError that names field, value and remedy unless `is_allowed`."""
    if not is_allowed:
        raise ConfigError(f"{name} is {value!r}; allowed: {allowed}")


@dataclass(frozen=True, slots=True)
class LinkConfig:
    """Deadlines and bounds of the protocol between processes (docs/protocol.md)."""

    heartbeat_interval_s: float = 0.5 * SECONDS
    """Both ways. Three fit into `peer_timeout_s`, so one lost or late frame is no death."""
    load_report_interval_s: float = 20 * MILLISECONDS
    """When leases end their worker sends its load in the turn after that, but not sooner than
    this after its last heartbeat. A cancel is promised within 100 ms and takes 40 ms at p99: this
    leaves time to see it. A thousand ends in one turn are one report."""
    peer_timeout_s: float = 1.5 * SECONDS
    """Silence after which a peer counts as dead."""
    progress_timeout_s: float = 1.5 * SECONDS
    """A peer that answers, has work and finishes no device step for this long is wedged, and counts
    as dead. Raise it where one step of a large model takes longer."""
    lease_ttl_s: float = 2.0 * SECONDS
    """A lease that its server has not renewed for this long is released. Above `peer_timeout_s`, so
    that the server gives up first."""
    tombstone_s: float = 30.0 * SECONDS
    """How long an ended attempt is remembered: longer than any frame can be under way."""
    max_tombstones: int = 100_000
    """About 15 MiB; at the bound the oldest is forgotten first."""
    sweep_interval_s: float = 50 * MILLISECONDS
    """How often expired leases, deadlines and stalled clients are looked for."""
    hello_timeout_s: float = 5.0 * SECONDS
    """A peer that connects and does not say HELLO within this time is forgotten."""
    kv_chunk_bytes: int = 1 * MIB
    """Payload per KV frame, rounded down to whole blocks (at least one): 1 MiB frames moved most
    bytes per second on tcp and ipc."""
    kv_window_bytes: int = 16 * MIB
    """Bytes a sender may have under way to one decode worker: 16 chunks hide the round trip."""
    kv_ring_bytes: int = 64 * MIB
    """Host memory for KV that is computed but not yet acknowledged; full means prefill stops
    taking work."""
    kv_stall_s: float = 2.0 * SECONDS
    """A transfer that gains no credit for this long has lost its receiver."""
    kv_retry_s: float = 1.0 * SECONDS
    """A chunk or manifest that is unanswered for this long is sent again: half of `kv_stall_s`, so
    that one lost frame does not end a transfer. Far above a round trip, so that a slow receiver is
    not sent everything twice."""
    kv_idle_s: float = 60.0 * SECONDS
    """A kv link that carried nothing for this long is closed; the next transfer dials again."""
    max_chunk_resends: int = 2
    """A chunk whose digest is wrong more often ends the attempt: the path is broken."""
    max_peers: int = 1024
    """Processes that one worker knows at once; at the bound a new HELLO is answered by GOODBYE."""
    max_operators: int = 16
    """Commands that watch one worker at once: people and supervisors, each for one drain."""
    control_hwm: int = 10_000
    """Frames per control pipe; a peer at this mark is busy and counts as failing. Frames are small
    (a TOKENS frame of 256 rows is 12 KiB)."""
    kv_hwm: int = 256
    """Frames per KV pipe; the byte window is reached first, this is the second fence."""
    dead_host_s: float = 3.0 * SECONDS
    """A TCP connection whose other host answers nothing for so long is closed by the kernel, which
    gives back what it holds. Who is dead the protocol's heartbeats have said before."""
    farewell_s: float = 2.0 * SECONDS
    """A worker that leaves waits this long for its servers to have heard it, which takes a busy
    machine a while; one that does not answer finds out by silence, as with a worker that died.
    Below what a supervisor waits before it kills."""
    handshake_s: float = 5.0 * SECONDS
    """A connection with a longer handshake is closed: a stranger cannot hold one for nothing.
    The two round trips take milliseconds."""
    redial_s: float = 2.0 * SECONDS
    """A HELLO without an answer for this long is said again over a new connection: the old one may
    lead nowhere, although its peer lives. Four heartbeats, so that a busy worker is not redialled;
    doubled each time, up to `max_redial_s`."""
    max_redial_s: float = 8.0 * SECONDS
    """After its keys or workers have been mended a fleet is whole again within this time."""
    linger_s: float = 200 * MILLISECONDS
    """A closed link may still hand what was sent to the kernel for this long, so that last words
    (ENDED, GOODBYE) arrive; a peer that reads nothing holds up the end of a process no longer."""
    max_control_frame_bytes: int = 16 * MIB
    """The largest control frame is a PREFILL of a 1M-token prompt: 4 MiB of ids and some."""
    max_kv_frame_bytes: int = 64 * MIB
    """One block of a very large model still fits."""
    wire: WireConfig = field(default_factory=WireConfig)
    """How KV travels."""

    def __post_init__(self) -> None:
        require(
            self.heartbeat_interval_s > 0, "heartbeat_interval_s", self.heartbeat_interval_s, "> 0"
        )
        require(
            0 < self.load_report_interval_s <= self.heartbeat_interval_s,
            "load_report_interval_s",
            self.load_report_interval_s,
            f"> 0 and <= heartbeat_interval_s ({self.heartbeat_interval_s})",
        )
        require(
            self.peer_timeout_s > 2 * self.heartbeat_interval_s,
            "peer_timeout_s",
            self.peer_timeout_s,
            f"> 2 x heartbeat_interval_s ({2 * self.heartbeat_interval_s})",
        )
        require(
            0 < self.kv_retry_s < self.kv_stall_s,
            "kv_retry_s",
            self.kv_retry_s,
            f"> 0 and < kv_stall_s ({self.kv_stall_s})",
        )
        require(
            self.lease_ttl_s > self.peer_timeout_s,
            "lease_ttl_s",
            self.lease_ttl_s,
            f"> peer_timeout_s ({self.peer_timeout_s})",
        )
        require(
            0 < self.redial_s <= self.max_redial_s,
            "redial_s",
            self.redial_s,
            f"> 0 and <= max_redial_s ({self.max_redial_s})",
        )
        require(self.handshake_s > 0, "handshake_s", self.handshake_s, "> 0")
        require(self.dead_host_s >= 1.0, "dead_host_s", self.dead_host_s, ">= 1")
        require(self.kv_chunk_bytes >= 1, "kv_chunk_bytes", self.kv_chunk_bytes, ">= 1")
        require(self.kv_window_bytes >= 1, "kv_window_bytes", self.kv_window_bytes, ">= 1")
        require(
            self.kv_ring_bytes >= self.kv_chunk_bytes,
            "kv_ring_bytes",
            self.kv_ring_bytes,
            f">= kv_chunk_bytes ({self.kv_chunk_bytes})",
        )


AUTO_BACKEND: Final = "auto"
"""The name of no backend, but of whichever is best here."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a worker computes with."""

    dtype: Dtype | None = None
    """None takes float32 on a CPU, where it is exact and costs memory alone, and on a GPU the
    checkpoint's own, because products in float32 do without tensor cores; float16 becomes
    bfloat16. Quantised weights (of a GGUF file) are computed in bfloat16 anywhere: what they lost
    exceeds its rounding, and it halves the memory that decode waits for."""
    weights: WeightFormat = WeightFormat.DTYPE
    """`int8`: rounded when they are loaded, each output by a scale of its own: half of bfloat16's
    memory, which decode of few sequences waits for. Logits are then off by up to 6 % of their
    spread (root mean square; bfloat16 alone: 2 %). Only `native` computes it."""
    backend: str = AUTO_BACKEND
    """What computes: `native` kernels on a CPU, `sdpa` (torch) anywhere, `triton` on NVIDIA,
    `flash` on NVIDIA with flash-attn. `auto` is `native` where its kernels were built and fit
    machine and model, else `sdpa`."""
    device: str = "cpu"
    block_size: int = 16
    """Tokens per KV block. 16 wastes 8 tokens per sequence on average; `flash` needs 256."""
    kv_pool_bytes: int = 512 * MIB
    """The pool of one worker; the number of blocks follows from the model."""
    max_num_seqs: int = 64
    """Rows of a decode step; more rows gain little once the step is bound by compute."""
    target_step_s: float = 50 * MILLISECONDS
    """How long a prefill step should take: a cancel (which may take 100 ms in all), a short prompt
    and the progress that a heartbeat shows wait for it. Each worker times itself at its start, and
    its budget of tokens follows what its steps take from then on."""
    max_num_batched_tokens: int = 512
    """Prompt tokens per prefill step: the bound on how long a short prompt waits for a long one."""
    prompt_chunk_tokens: int = 64
    """Prompt tokens in a decode step beside running streams, where decode computes prompts itself:
    what they may wait for. Fewer hardly shorten the step, for the weights are read all the same."""
    max_model_len: int | None = None
    """Context length; None takes the model's own."""
    threads: int | None = None
    """CPU threads of the device thread's kernels; None divides the cores among local workers."""
    niceness: int = 5
    """Of the device's threads on the CPU: whoever moves bytes (a cancel, a heartbeat, a token) goes
    before whoever computes where both want the same core, which is a few per cent of the time."""
    prefix_cache: bool = True
    """Keep the KV of finished blocks in memory that nobody leases, for prompts that begin alike. It
    gives way before anybody is refused or preempted, so it costs nothing."""
    kv_wire: KvWire = KvWire.EXACT
    """`int8` halves what travels, for slow links, and costs exactness."""
    host_cache_bytes: int = 0
    """Host memory of each worker for KV that gave way: a hit copies it back into the pool. None by
    default, because on a CPU the pool itself lies in host memory: raise `kv_pool_bytes` there."""
    max_waiting_steps: int = 2
    """Calls that may wait for the device thread behind the running one: one step ahead keeps it
    busy, and whatever is decided later is decided better."""
    gpu: GpuConfig = field(default_factory=GpuConfig)
    embedding: EmbeddingConfig = field(default_factory=EmbeddingConfig)
    masks: MaskConfig = field(default_factory=MaskConfig)
    poison_freed_blocks: bool = False
    """Fill freed blocks with NaN, and let an audit look whether they stay so: how tests find a
    write by somebody who is not the owner, and a read beyond a sequence. Costs a write per freed
    block, and an audit reads the whole pool."""
    close_timeout_s: float = 5.0 * SECONDS
    """How long leaving waits for the running step; longer than any step but a wedged one."""

    @property
    def chosen_dtype(self) -> Dtype:
        """`dtype`, or float32 where none was chosen."""
        return self.dtype or Dtype.FLOAT32

    def __post_init__(self) -> None:
        require(self.block_size >= 1, "block_size", self.block_size, ">= 1")
        require(
            1 <= self.max_num_seqs <= MAX_NUM_SEQS,
            "max_num_seqs",
            self.max_num_seqs,
            f"1…{MAX_NUM_SEQS}",
        )
        require(
            self.max_num_batched_tokens >= self.block_size,
            "max_num_batched_tokens",
            self.max_num_batched_tokens,
            f">= block_size ({self.block_size})",
        )
        require(
            self.prompt_chunk_tokens >= 1, "prompt_chunk_tokens", self.prompt_chunk_tokens, ">= 1"
        )
        require(self.target_step_s > 0, "target_step_s", self.target_step_s, "> 0")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, ">= 1")
        require(0 <= self.niceness <= 19, "niceness", self.niceness, "0…19")
        require(self.host_cache_bytes >= 0, "host_cache_bytes", self.host_cache_bytes, ">= 0")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One prefill or decode process."""

    name: str
    model_dir: str
    control_address: str
    """Where servers reach this worker: `ipc://…` or `tcp://host:port`."""
    kv_address: str | None = None
    """Decode only: where prefill workers reach it."""
    advertised_kv_address: str | None = None
    """Decode only: what it tells them instead, where they see another address than the one that can
    be bound here: behind NAT, or in a container with published ports."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    lending: LendingConfig | None = None
    """With whom it shares cores that have nothing to compute; None for nobody."""
    curve_dir: str | None = None
    """Key directory; required for any tcp address."""
    max_waiting_tokens: int = 32_768
    """Prefill only: prompt tokens that may wait inside the worker. So few that fairness, deadlines
    and cancellation act in the server; this much keeps the device busy for a round trip."""
    step_timeout_s: float = 60.0 * SECONDS
    """A device step longer than this is a wedged device: the worker exits and is restarted."""
    drain_timeout_s: float = 30.0 * SECONDS
    """After SIGTERM running sequences may finish for this long; the server's own bound."""


def _require_network(network: str) -> None:
    try:
        ip_network(network)
    except ValueError as error:
        allowed = "networks such as 10.0.0.0/8 or fd00::/8, separated by commas"
        raise ConfigError(
            f"trusted_proxies holds {network!r}: {error}; allowed: {allowed}"
        ) from None


_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}
ANY_ORIGIN: Final = "*"
"""Stands for the pages of every origin."""


def _require_origin(origin: str) -> None:
    scheme, _, place = origin.partition("://")
    is_usual = not place.endswith(_DEFAULT_PORTS.get(scheme, "/"))
    require(
        origin == ANY_ORIGIN or (_ORIGIN.fullmatch(origin) is not None and is_usual),
        "allow_origins holds a value that",
        origin,
        "* or SCHEME://HOST[:PORT] as browsers send it: lower case, no path, no default port",
    )


ANY_MODEL: Final = "*"
"""An alias that stands for every name."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The front process."""

    model_dir: str
    model_name: str
    prefill_addresses: tuple[str, ...]
    decode_addresses: tuple[str, ...]
    model_aliases: tuple[str, ...] = ()
    """Other names that requests may use for the model; ANY_MODEL accepts every name. Tools with a
    fixed name work unchanged then."""
    strict_requests: bool = False
    """Whether a parameter that is not known is refused. Otherwise it is ignored and named in the
    answer's `x-triolet-ignored`: clients of other servers send their extensions."""
    tool_parser: ToolParser = ToolParser.AUTO
    """How calls of tools are told from text. Told by the model's chat template unless it is named,
    for a template that says nothing of calls, or names tokens of another family."""
    host: str = "127.0.0.1"
    port: int = 8000
    link: LinkConfig = field(default_factory=LinkConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    door: DoorConfig = field(default_factory=DoorConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    response_cache: ResponseCacheConfig = field(default_factory=ResponseCacheConfig)
    embedding: EmbeddingLimits = field(default_factory=EmbeddingLimits)
    batches: BatchConfig = field(default_factory=BatchConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    curve_dir: str | None = None
    token_window: int = 64
    """Tokens a stream may run ahead of what its client has read (back-pressure, window 2)."""
    stall_timeout_s: float = 10.0 * SECONDS
    """A client that reads nothing for this long while tokens wait loses its stream."""
    keep_alive_s: float = 10.0 * SECONDS
    """SSE comment interval, from the moment a request is queued; below every proxy's idle limit."""
    default_deadline_s: float = 600.0 * SECONDS
    """A request that names no deadline ends here: nothing may live for ever."""
    max_queued_requests: int = 1024
    """Requests of a class and those above it that wait for a worker: a flood of lower classes fills
    none of it. Where it is full, a tenant still has a place while it has less than its part by
    weight. About 8 KiB each plus their prompt."""
    worker_wait_s: float = 30.0 * SECONDS
    """How long requests are kept while no worker of a role is there: a restart with loading of the
    model. Beyond, they are refused with 503."""
    max_attempts: int = 3
    """One try and two retries that get a request nowhere. Whoever gets 16 tokens on between two
    faults begins to count anew: the death of a worker shall cost a pause, not an answer."""
    max_connections: int = 4096
    """Client connections; where all are busy the next gets a 503 and is closed. Below the usual fd
    limit of 8192."""
    max_connections_per_address: int | None = None
    """Of one client address, of IPv6 one /64; None for half of `max_connections`. So no address
    holds all places, and a load test from one machine has two thousand. Beyond it an address's own
    idle connections give way. Peers in `trusted_proxies` are counted in the total only."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks (CIDR) of proxies that may name the client that they ask for, by PROXY protocol v2,
    `Forwarded` or `X-Forwarded-For`. None by default: any client could claim any address."""
    allow_origins: tuple[str, ...] = ()
    """Origins whose pages may use the API from a browser (CORS); ANY_ORIGIN is every one. None by
    default: without keys any page that the user opens could ask. The chat page needs none."""
    preflight_max_age_s: int = 7200
    """How long a browser may keep the answer to a preflight; the longest that Chromium takes. What
    it permits is checked with every request all the same."""
    requests_per_turn: int = 2
    """Requests that begin in one turn of the event loop; the others wait for the next turns. One
    that is read and refused at once costs up to 5 ms, and a probe of liveness takes ten turns: so
    it is answered within 100 ms in any crowd. A refused small request costs less processor time
    than without the bound (1.41 ms for 1.66, 40 connections)."""
    listen_backlog: int = 1024
    """Connections the kernel holds during a burst; hypercorn's default of 100 drops some."""
    max_body_bytes: int = 16 * MIB
    max_header_bytes: int = 16 * 1024
    max_header_fields: int = 64
    header_timeout_s: float = 10.0 * SECONDS
    """Request line and headers must be in by then."""
    body_timeout_s: float = 60.0 * SECONDS
    body_grace_s: float = 10.0 * SECONDS
    """A body may take this long whatever its size; beyond, `body_min_bytes_per_s` counts."""
    body_min_bytes_per_s: float = 1024.0
    """No honest client on any network is slower; what is slower holds a connection for nothing."""
    send_buffer_bytes: int = 128 * KIB
    """What the kernel may hold for one client that does not read: with the token window it bounds
    how far an answer runs ahead of its reader."""
    allow_remote_clients: bool = False
    """Without tenants whoever reaches the port may use it. Binding to anything but loopback has to
    be meant."""
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    max_choices: int = 8
    """`n`: answers to one prompt."""
    max_prompts: int = 32
    """Prompts in one request for completions; with `max_choices` at most 256 sequences."""
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    """How the model's reasoning is told from its answer. Found by the tokenizer's markers unless it
    is named: `none` shows all as text."""
    metrics_compat: str = "vllm"
    """Whose names the metrics also go by, so that existing dashboards work; `none` for nobody's."""
    idle_connection_s: float = 75.0 * SECONDS
    """Keep-alive; longer than the 60 s idle time of common load balancers, so that they close
    first and no request meets a closing socket."""
    tcp_user_timeout_s: float = 11.0 * SECONDS
    """The kernel drops a peer that acknowledges nothing, or leaves its window shut, for this long,
    but not before `stall_timeout_s` has ended its streams, by whose clock it is known why."""
    tokenize_threads: int = 2
    tokenize_timeout_s: float = 10.0 * SECONDS
    """Template and tokenizer run in threads: this bounds how long a request waits for them."""
    ws_ping_s: float = 15.0 * SECONDS
    ws_pong_timeout_s: float = 30.0 * SECONDS
    ws_max_message_bytes: int = 1 * MIB
    ws_max_messages_per_s: float = 50.0
    """A chat sends one message a turn; more is a flood."""
    ws_max_frames_per_s: float = 500.0
    """Fragments and pings count too: a message in one-byte pieces costs more than its size."""
    ws_max_streams: int = 8
    """Answers at once on one WebSocket."""
    ws_max_queued: int = 32
    """Questions that wait on one WebSocket behind the answers under way."""
    ws_outbox_bytes: int = 64 * KIB
    """Frames that wait for a WebSocket's writer; at the bound the answers wait, and with them the
    tokens' credit. Bytes, because a token with 20 alternatives takes 2 KiB; at half of what the
    kernel holds, a client that reads is never kept waiting by it."""
    recent_s: float = 30.0 * SECONDS
    """Over which `/fleet/status` tells rates and latencies: a dashboard that was just opened shows
    them at once."""
    sample_s: float = 2.0 * SECONDS
    """How often the counters are kept for that: sixteen copies of two histograms."""
    audit_timeout_s: float = 1.0 * SECONDS
    """An audit waits for its workers this long. A live one answers between two frames; below
    `peer_timeout_s`, so that a worker which is listed as silent is not simply dead."""
    max_audits: int = 8
    """Audits at once; each asks every worker."""
    drain_timeout_s: float = 30.0 * SECONDS
    """After SIGTERM running streams may finish for this long, then each gets a terminal event."""
    listen_fd: int | None = None
    """A bound socket that whoever started this process holds too: it outlives the process, so that
    a successor can accept on it before this one has ended."""
    siblings: SiblingConfig | None = None
    """Other servers on the same port; None where this is the only one."""
    handover_s: float = 1.0 * SECONDS
    """After a successor has taken over the port, requests on connections that are open already are
    still answered for this long: a client in full swing learns with its next answer that it should
    connect anew."""
    spare_addresses: tuple[str, ...] = ()
    """Those of the workers' addresses where usually nobody is: a worker is there only while another
    one is replaced."""
    exit_grace_s: float = 5.0 * SECONDS
    """After the drain the process leaves within this time, whatever a socket does."""

    @property
    def address_connections(self) -> int:
        """Connections that one client address may have."""
        return self.max_connections_per_address or max(1, self.max_connections // 2)

    def serves(self, name: str) -> bool:
        """Return whether requests may call the model by this name."""
        return name in (self.model_name, *self.model_aliases) or ANY_MODEL in self.model_aliases

    def __post_init__(self) -> None:
        require(self.token_window >= 1, "token_window", self.token_window, ">= 1")
        require(self.requests_per_turn >= 1, "requests_per_turn", self.requests_per_turn, ">= 1")
        require(self.stall_timeout_s > 0, "stall_timeout_s", self.stall_timeout_s, "> 0")
        require(
            0 <= self.drain_timeout_s <= DAY_S,
            "drain_timeout_s",
            self.drain_timeout_s,
            f">= 0 and <= {DAY_S:.0f}, a day: the timer that ends the process takes no infinity",
        )
        sample_s, most = self.sample_s, f"> 0 and <= recent_s ({self.recent_s})"
        require(0 < sample_s <= self.recent_s, "sample_s", sample_s, most)
        per_address = self.max_connections_per_address
        require(
            per_address is None or per_address >= 1,
            "max_connections_per_address",
            per_address,
            ">= 1",
        )
        for network in self.trusted_proxies:
            _require_network(network)
        for origin in self.allow_origins:
            _require_origin(origin)
        max_age_s = self.preflight_max_age_s
        require(max_age_s >= 0, "preflight_max_age_s", max_age_s, ">= 0")
        compat = self.metrics_compat
        require(compat in {"vllm", "none"}, "metrics_compat", compat, "vllm, none")
        if not (self.allow_remote_clients or self.tenants.file or is_loopback(self.host)):
            raise ConfigError(
                f"host is {self.host!r}, which other machines can reach, and whoever does "
                "could use this server: give --tenants FILE, or bind 127.0.0.1 (and put a proxy "
                "with authentication in front), or give --allow-remote-clients"
            )

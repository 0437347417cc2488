"""Settings of the server: models, connections, streams, caches, batches; each with its reason."""

from __future__ import annotations

import re
from collections.abc import Mapping  # noqa: TC003 (get_type_hints reads the annotations)
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from typing import Annotated, Final, Literal

from msgspec import Meta

from ..errors import SettingError
from ..loopback import is_loopback
from ..service_class import CLASS_OF_NAME
from ..units import KIB, MIB, MILLISECONDS, SECONDS
from .adapters import AdapterConfig  # noqa: TC001 (get_type_hints reads the annotations)
from .auto import AutoConfig
from .hosts import HostsConfig
from .limits import Count, CountOrZero, LabelText, NotNegative, Positive, require
from .link import LinkConfig
from .membership import MembershipConfig, RedisMembersConfig, ScaleConfig
from .models import ServedModelConfig  # noqa: TC001 (get_type_hints reads the annotations)
from .objectives import ObjectivesConfig
from .parsers import ReasoningParser, ToolParser
from .responses import ResponseCacheConfig, StoredResponsesConfig
from .routes import CandidateConfig, RoutesConfig
from .scheduling import (
    EmbeddingLimits,
    OverloadConfig,
    QueueConfig,
    QuotaConfig,
    RecoveryConfig,
    RoutingConfig,
)
from .usage import UsageConfig


@dataclass(frozen=True, slots=True)
class PeerServersConfig:
    """One server among several that share a port; each asks the others for their metrics."""

    name: str
    """Its own name, unique among them."""
    own_fd: int
    """A bound Unix socket on which the others reach this server, held open by its parent process,
    as `listen_fd` is."""
    paths: tuple[tuple[str, str], ...]
    """Name and socket path of every server, including this one."""
    ask_timeout_s: float = 3.0 * SECONDS
    """For another server's answer, which comes from memory or is an audit: longer than
    `audit_timeout_s`. A server that is restarting is left out."""


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """Bounds on clients' grammars, checked before a request is queued."""

    max_bytes: int = 16 * KIB
    """Maximum size of a schema, expression or grammar. Real ones are far smaller."""
    max_depth: int = 32
    """Depth of nested brackets: compilers recurse."""
    cpu_s: float = 50 * MILLISECONDS
    """For compiling, in a process that is killed after this time. Real schemas take 1 to 5 ms; in a
    worker a grammar is compiled beside running streams. If these use every core, compiling gets a
    part of one and takes correspondingly longer by the clock."""
    walk_tokens: int = 32
    """Tokens of each trial walk through a compiled grammar: an ambiguous one stays within all
    bounds at its first token and exceeds them around the tenth. Workers bound the rest."""
    walk_cpu_s: float = 20 * MILLISECONDS
    """For all walks through one grammar; then they stop without a verdict. 0.1 ms per mask with a
    small vocabulary: the walks of a real schema end earlier."""
    walk_mask_cpu_s: float = 30 * MILLISECONDS
    """For one mask of a walk; a grammar that takes longer is too costly. Real ones take up to 6 ms
    with a vocabulary of 65,000 tokens (an object of 200 optional properties)."""
    memory_bytes: int = 512 * MIB
    """Memory for compiling, on top of what the process has."""
    max_remembered: int = 1024
    """Verdicts to keep: clients send the same grammar repeatedly."""


@dataclass(frozen=True, slots=True)
class TemplateConfig:
    """Bounds on rendering chat templates that are not known to be cheap."""

    cpu_s: float = 1.0 * SECONDS
    """For compiling and rendering, in a process that is killed after this time. The costliest known
    template takes 50 ms for both, with a hundred turns."""
    memory_bytes: int = 512 * MIB
    """Memory on top of what the process has: a text of 64 MiB, in pieces and as a whole."""
    max_bytes: int = 64 * MIB
    """Maximum size of the text: four times the largest request body. Templates repeat little."""


@dataclass(frozen=True, slots=True)
class TurnsConfig:
    """Queues for the processes that parse, render, tokenise and compile: one for each tenant, or
    for each client address where there are no tenants (server/text/turns.py)."""

    max_waiting: Count = 4096
    """Waiting jobs in all queues: as many as there may be connections."""
    max_waiting_each: Count = 1024
    """Waiting jobs of one tenant or address: as many as one class may have queued requests. The
    next one gets a 429; other clients' jobs are not affected."""
    recent_s: NotNegative = 10.0 * SECONDS
    """A key leaves one process free until no other key has had a job for this long: a running job
    is not interrupted, and the largest conversations take a second. A single key uses all
    processes."""


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """Checks on a request before its body is read (server/api/door.py)."""

    max_body_bytes: Count = 256 * MIB
    """Total size of bodies that are being received, or wait for parsing and tokenising: 1/16 of a
    machine with 4 GiB. Beyond this a large body gets a 503 before it is read."""
    max_body_bytes_each: Count = 64 * MIB
    """The limit per tenant, or per address if there are no tenants: four bodies of the largest
    size, and a quarter of `max_body_bytes`, so that it takes four clients to fill it.
    Beyond this a large body gets a 429 before it is read."""
    small_body_bytes: Count = 64 * KIB
    """Bodies up to this size count but are never refused, so that large ones do not block ordinary
    requests. As many as there may be connections take 256 MiB."""
    body_retry_s: Positive = 1.0 * SECONDS
    """Retry time for a body that does not fit: most bodies arrive within a second."""
    refusals_per_s: Positive = 20.0
    """Refusals of one tenant or address, at once and per second, that are answered immediately.
    Further ones wait: a client that retries at once would take the event loop's time from others,
    at a millisecond per refusal."""
    max_refusal_wait_s: NotNegative = 2.0 * SECONDS
    """Longest delay of a refusal. Clients that obey `retry-after` wait this long anyway."""
    refusals_logged_per_s: Positive = 10.0
    """Log lines about refused requests, at once and per second, from the application and the edge
    each: enough to see what a misconfigured client does, and 20 MB per hour of attack."""


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """The tenants file."""

    file: str | None = None
    """None means no tenants: every client that reaches the port is admitted."""
    poll_s: float = 1.0 * SECONDS
    """Interval at which the file is checked. A change counts once it is unchanged at the next
    check, because an editor may still be writing. So a key is shut out within 2 s."""
    max_bytes: int = 8 * MIB
    """Size of the file: about 20 times what the largest number of tenants takes. Parsing it takes
    seconds of a thread."""
    quotas: QuotaConfig = field(default_factory=QuotaConfig)
    """Where accounts of usage are kept."""


BACKGROUND_WINDOW: Final = 4
"""Tokens that a batch line may run ahead: it pauses this soon when an interactive request
arrives."""


BACKGROUND_HOLD_S: Final = 0.5 * SECONDS
"""How long it pauses at most: it holds a row and blocks that the interactive request may be waiting
for. Under a flood a running line advances by one window per pause, and a line that has not begun
queues after the flood."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Files and batches, with their database."""

    directory: str | None = None
    """Folder of the database; None turns files and batches off. Off by default: the operator
    decides where data that outlives a process is stored."""
    max_total_bytes: int = 1024 * MIB
    """Total size of files, including results. Beyond it no file is accepted, and running batches
    end their lines with errors."""
    max_files: int = 1000
    """Files kept at once."""
    max_open_batches: int = 100
    """Batches that have not ended."""
    owner_share: float = 0.25
    """Share of each of these three limits for one tenant, so that a few cannot lock out the others.
    It does not apply without tenants."""
    max_lines: int = 50_000
    """Lines of one batch: the same limit as OpenAI's API."""
    concurrency: Count = 4
    """Lines that run at once. More would take rows from interactive requests, and a paused line
    keeps its blocks."""
    lease_s: float = 5.0 * SECONDS
    """One of several servers runs the batches. If it is silent for this long, another takes over.
    It renews its claim every third of this. After a longer standstill its lines are computed
    again."""
    poll_s: float = 0.5 * SECONDS
    """Interval at which new work is looked for when nothing else happens."""
    max_line_attempts: int = 8
    """Attempts of a line that is answered with 503 or 504. A restarting fleet takes seconds."""
    paused_s: float = 5.0 * SECONDS
    """How long a line that has not begun stays in the queue while batches are paused. There it uses
    part of its tenant's limits, which the tenant's own requests may need; a shorter brownout costs
    it nothing."""
    retry_s: float = 1.0 * SECONDS
    """Before the second attempt; doubled for each further one."""
    min_free_bytes: int = 64 * MIB
    """Free disk space below which no line begins. This leaves room for the running lines, the
    lease, and for a while for other writers on that disk."""
    max_held_retry_s: float = 5.0 * SECONDS
    """Longest interval between attempts to write an answer that the database refused, starting with
    `retry_s`. Until then the answer stays in memory and occupies its line's slot, so there are
    never more than `concurrency`."""

    def most_of(self, owner: str, most: int) -> int:
        """Return one owner's part of a limit."""
        return max(1, int(most * self.owner_share)) if owner else most


@dataclass(frozen=True, slots=True)
class ResumeConfig:
    """Bounds on answers that clients can resume."""

    ttl_s: float = 600 * SECONDS
    """How long a finished answer is kept: longer than the official clients retry."""
    grace_s: float = 30 * SECONDS
    """How long an answer without a reader continues: a client that changes networks or restarts is
    back by then. No longer, because it holds a row and KV."""
    away_grace_s: float = 5 * SECONDS
    """Grace time if the client closed the connection with code 1001, as browsers do when leaving: a
    reloaded page is back within a second, and a closed tab should hold nothing."""
    buffer_bytes: int = 1 * MIB
    """Buffer per answer. Beyond this the oldest part that was read is dropped: 4,000 chunks of one
    token each."""
    ahead_bytes: int = 64 * KIB
    """How far an answer runs ahead of its fastest reader; then tokens and credit wait as for every
    client."""
    max_live: int = 64
    """Answers under way at once; the next one is refused with 503."""
    owner_share: float = 0.25
    """Share of these for one tenant."""
    max_kept: int = 4096
    """Answers in all; beyond this the tenant with the most loses its oldest finished one."""
    max_kept_bytes: int = 64 * MIB
    """Total size of finished answers. Beyond this the tenant with the most bytes loses its
    oldest."""
    sweep_s: float = 1 * SECONDS
    """Interval at which these times are checked."""


DAY_S = 86_400.0 * SECONDS


def _require_network(network: str) -> None:
    try:
        ip_network(network)
    except ValueError as error:
        allowed = "networks such as 10.0.0.0/8 or fd00::/8, separated by commas"
        raise SettingError(
            f"trusted_proxies holds {network!r}: {error}; allowed: {allowed}"
        ) from None


_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@A-Z]+")


_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


ANY_ORIGIN: Final = "*"
"""Stands for pages of every origin."""


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
"""An alias that matches every name."""


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The server process, which clients connect to."""

    model_dir: str = ""
    """Absolute path of the model; set from `fleet.model`."""
    model_name: str = ""
    """The model's name for clients; empty means the name of its directory."""
    prefill_addresses: tuple[str, ...] = ()
    """Control addresses of prefill workers, including those in `spare_addresses`."""
    decode_addresses: tuple[str, ...] = ()
    """Control addresses of decode workers, including those in `spare_addresses`."""
    model_digest: str = ""
    """sha256:… of the model's version in the store; empty for a directory outside the store."""
    compute_digest: str = ""
    """sha256:… of the part of the version that determines the computed bits; its workers have the
    same one. Empty for a directory outside the store."""
    control_addresses: tuple[str, ...] = ()
    """Addresses of control, which loads and unloads models or moves their routes. Several if some
    are standbys; none if the workers of all models always run."""
    control_fleet: str = "triolet"
    """As `control.fleet`."""
    model_adapters: tuple[AdapterConfig, ...] = ()
    """LoRA adapters of the model; set from `fleet.adapters`."""
    unnamed_adapters: tuple[AdapterConfig, ...] = ()
    """Adapters that workers may have but requests must not name: one that is being loaded or
    unloaded. `triolet serve` fills it in."""
    models: tuple[ServedModelConfig, ...] = ()
    """All models if there are several; empty if the fields above describe the only one."""
    model_aliases: tuple[str, ...] = ()
    """Other names for the model in requests; `*` accepts every name except `NAME:ADAPTER` with the
    name of a model. Tools with a fixed name then work unchanged."""
    auto: AutoConfig = field(default_factory=AutoConfig)
    """How to choose a model for requests for `auto`."""
    strict_requests: bool = False
    """Whether to refuse unknown parameters. Otherwise they are ignored and listed in the answer's
    `x-triolet-ignored`: clients of other servers send their extensions."""
    tool_parser: ToolParser = ToolParser.AUTO
    """How tool calls are recognised in text. Detected from the model's chat template by default;
    set it if the template does not show calls, or names tokens of another family. For a template
    without tools `generic_tools` takes precedence."""
    generic_tools: bool = True
    """Whether a model without tools in its chat template gets them in its system prompt, with a
    grammar that enforces their schemas. If off, `tools` are refused there unless a call is
    required. Turn it off for clients that put tools into their own prompt, and for prompts that
    must not be changed."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8000
    """Port to listen on; 0 takes any free port."""
    link: LinkConfig = field(default_factory=LinkConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    routes: RoutesConfig = field(default_factory=RoutesConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    door: DoorConfig = field(default_factory=DoorConfig)
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    response_cache: ResponseCacheConfig = field(default_factory=ResponseCacheConfig)
    responses: StoredResponsesConfig = field(default_factory=StoredResponsesConfig)
    embedding: EmbeddingLimits = field(default_factory=EmbeddingLimits)
    batches: BatchConfig = field(default_factory=BatchConfig)
    usage: UsageConfig = field(default_factory=UsageConfig)
    candidates: CandidateConfig = field(default_factory=CandidateConfig)
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    zone: LabelText = ""
    """The server's zone, as in `worker.labels.zone`; empty for none. Of workers with equally many
    streams, those in this zone are preferred. Tenants bound to zones are served only if this is one
    of them."""
    curve_dir: str | None = None
    """Key directory (`triolet keys make`); required for any tcp address."""
    token_window: Count = 64
    """Tokens that a stream may run ahead of its client (back-pressure)."""
    stall_timeout_s: Positive = 10.0 * SECONDS
    """A client that reads nothing for this long while tokens wait loses its stream."""
    keep_alive_s: float = 10.0 * SECONDS
    """Interval of SSE comments, starting when a request is queued; below every proxy's idle
    limit."""
    default_deadline_s: float = 600.0 * SECONDS
    """Deadline of a request; a tenant's plan and the client may only shorten it. No request may run
    forever."""
    max_queued_requests: CountOrZero = 1024
    """Most waiting requests of a class and the classes above it, for each pool of workers, so that
    a flood of lower classes takes none of these places. When they are full, a tenant below its
    share by weight still gets a place. Each takes about 8 KiB plus its prompt."""
    worker_wait_s: float = 30.0 * SECONDS
    """How long requests are kept while no worker of a role is there: a restart, including loading
    the model. After that they are refused with 503."""
    max_attempts: int = 3
    """One try and two retries that make no progress. The count restarts after 16 new tokens between
    two faults: the death of a worker should cost a pause, not an answer."""
    max_connections: Count = 4096
    """Client connections; if all are busy, the next one gets a 503 and is closed. Below the usual
    limit of 8192 file descriptors."""
    max_connections_per_address: Count | None = None
    """Connections of one client address (for IPv6, one /64); None means half of `max_connections`.
    So no address takes all places, and a load test from one machine gets two thousand. Beyond this
    the address's own idle connections are closed. For peers in `trusted_proxies` only the total
    counts."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks (CIDR) of proxies that may state a client's address (PROXY protocol v2, `Forwarded`,
    `X-Forwarded-For`), objective and fairness id. Any client could claim these."""
    gateway_objectives: Mapping[str, str] = field(default_factory=dict)
    """Service class by objective, for `x-gateway-inference-objective` from trusted proxies. Other
    objectives are ignored."""
    allow_origins: tuple[str, ...] = ()
    """Origins of pages that may use the API from a browser (CORS); `*` means all. None by default:
    without keys, any page could send requests. The chat page needs none."""
    preflight_max_age_s: CountOrZero = 7200
    """How long a browser may keep the answer to a preflight request; the longest that Chromium
    accepts. Every request is checked all the same."""
    requests_per_turn: Count = 2
    """Requests that begin in one turn of the event loop; the others wait for the next turns. One
    that is read and refused at once costs up to 5 ms, and a liveness probe takes ten turns, so it
    is answered within 100 ms under any load. Without it, refused requests cost more."""
    listen_backlog: int = 1024
    """Connections that the kernel queues during a burst; hypercorn's default of 100 drops some."""
    max_body_bytes: Count = 16 * MIB
    """Maximum size of a request body. A prompt of 1M tokens is about 4 MB of text."""
    free_chunks: int = 1024
    """Chunks of one request body, of any size: clients that stream JSON send each number or name as
    a chunk, and this many cost 0.1 s of CPU time."""
    min_chunk_bytes: Count = 64
    """Beyond `free_chunks` a body may have one more chunk per this many bytes, else a 400. Chunks
    of 64 bytes, 90 µs each, cost less than 64 bytes of small requests."""
    max_header_bytes: int = 16 * 1024
    """Request line and headers of one request: they are read before the client is known."""
    max_header_fields: int = 64
    """Header lines of one request."""
    header_timeout_s: float = 10.0 * SECONDS
    """Request line and headers must have arrived within this time."""
    body_timeout_s: float = 60.0 * SECONDS
    """Longest time for a body from its first byte, at any rate."""
    body_grace_s: float = 10.0 * SECONDS
    """Time for a body of any size; after that `body_min_bytes_per_s` applies."""
    body_min_bytes_per_s: float = 1024.0
    """No real client is slower; anything slower just occupies a connection."""
    send_buffer_bytes: int = 128 * KIB
    """Data that the kernel holds for one client that does not read: together with the token window
    it bounds how far an answer runs ahead of its reader."""
    allow_remote_clients: bool = False
    """Without tenants every client that reaches the port may use it. Binding to anything but
    loopback therefore needs this option."""
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    max_choices: int = 8
    """`n`: number of answers to one prompt."""
    max_prompts: int = 32
    """Prompts in one request for completions; with `max_choices` at most 256 sequences."""
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    """How reasoning is recognised in the model's output. Detected from the tokenizer's markers by
    default; `none` shows everything as text."""
    metrics_compat: Literal["vllm", "none"] = "vllm"
    """Also export metrics under this server's names, so that existing dashboards work. `none`
    turns it off."""
    idle_connection_s: float = 75.0 * SECONDS
    """Keep-alive; longer than the 60 s idle time of common load balancers, so that they close first
    and no request meets a closing socket."""
    tcp_user_timeout_s: float = 11.0 * SECONDS
    """The kernel drops a peer that acknowledges nothing, or keeps its window closed, for this long.
    Longer than `stall_timeout_s`, which ends its streams first and with a known reason."""
    text_processes: Count = 2
    """Processes that parse, render, tokenise and compile large inputs, at a lower priority than
    workers on the same machine. With two, one client's longest job leaves one for others."""
    text_timeout_s: Positive = 10.0 * SECONDS
    """How long a job may wait and run: the largest conversations take a second. After that its
    process is killed."""
    text_start_s: float = 120.0 * SECONDS
    """Seconds of CPU for each step of a new process's start. It may get a quarter of a core."""
    ws_ping_s: float = 15.0 * SECONDS
    """Interval of pings on a WebSocket; below every proxy's idle limit."""
    ws_pong_timeout_s: float = 30.0 * SECONDS
    """A WebSocket without input for this long is closed: two pings without an answer."""
    ws_max_message_bytes: int = 1 * MIB
    """Maximum size of a message from a client."""
    ws_max_messages_per_s: float = 50.0
    """A chat sends one message per turn; more than this is a flood."""
    ws_max_frames_per_s: float = 500.0
    """Fragments and pings count too: a message in one-byte pieces costs more than its size."""
    ws_max_streams: int = 8
    """Concurrent answers on one WebSocket."""
    ws_max_queued: int = 32
    """Requests that wait on one WebSocket behind the answers under way."""
    ws_outbox_bytes: int = 64 * KIB
    """Data that waits for a WebSocket's writer; at the limit answers and their credit wait. In
    bytes, because a token with 20 alternatives takes 2 KiB; half of what the kernel holds, so that
    a client that reads never has to wait for it."""
    recent_s: float = 30.0 * SECONDS
    """Window of the rates and latencies in `/fleet/status`: a dashboard that was just opened shows
    them at once."""
    sample_s: Positive = 10.0 * SECONDS
    """Interval at which counters are sampled for recent figures and for the history."""
    history_s: Positive = 3600.0 * SECONDS
    """Time that `/fleet/history` covers: an incident and what led to it. An hour takes 430 KiB with
    one model, and 160 KiB for each further one."""
    history_models: Count = 16
    """Models with their own charts, in the order of `/fleet/status`; the rest count together as
    `other`."""
    audit_timeout_s: float = 1.0 * SECONDS
    """How long an audit waits for its workers. A live one answers between two frames; shorter than
    `peer_timeout_s`, so that a worker listed as silent is not simply dead."""
    max_audits: int = 8
    """Concurrent audits; each asks every worker."""
    drain_timeout_s: float = 30.0 * SECONDS
    """How long running streams may continue after SIGTERM; then each gets a terminal event."""
    listen_fd: int | None = None
    """A bound socket that the parent process holds too: it outlives this process, so that a
    successor can accept on it before this one has ended."""
    peers: PeerServersConfig | None = None
    """Other servers on the same port; None if this is the only one."""
    hosts: HostsConfig = field(default_factory=HostsConfig)
    """Servers on other hosts."""
    handover_s: float = 1.0 * SECONDS
    """How long open connections are served after a successor has taken over the port: a busy client
    learns with its next answer that it should reconnect."""
    spare_addresses: tuple[str, ...] = ()
    """Worker addresses that are usually unused: a worker listens there only while another one is
    replaced."""
    members_file: str | None = None
    """Members file, if workers change while the server runs; None, or a file that does not exist
    yet, means the workers at the addresses above."""
    members_poll_s: Positive = 250 * MILLISECONDS
    """Interval at which this file is checked: a new worker takes longer to start."""
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    """DNS or Redis as the source of workers. The addresses above are used until it answers."""
    scale: ScaleConfig = field(default_factory=ScaleConfig)
    exit_grace_s: float = 5.0 * SECONDS
    """The process exits within this time after the drain, whatever a socket does."""

    @property
    def of_models(self) -> tuple[ServerConfig, ...]:
        """Return one configuration per model, as if it were the only one."""
        return tuple(
            replace(
                self,
                models=(),
                model_dir=one.model_dir,
                model_name=one.name,
                model_digest=one.digest,
                compute_digest=one.compute_digest,
                model_aliases=one.aliases,
                prefill_addresses=one.prefill_addresses,
                decode_addresses=one.decode_addresses,
                spare_addresses=one.spare_addresses,
                tool_parser=one.tool_parser,
                reasoning_parser=one.reasoning_parser,
                model_adapters=one.adapters,
                unnamed_adapters=one.unnamed_adapters,
                default_deadline_s=min(
                    self.default_deadline_s, one.default_deadline_s or self.default_deadline_s
                ),
            )
            for one in self.models
        ) or (self,)

    @property
    def address_connections(self) -> int:
        """Most connections of one client address."""
        return self.max_connections_per_address or max(1, self.max_connections // 2)

    @property
    def sources(self) -> tuple[str, ...]:
        """Configured sources of changing workers; at most one is allowed."""
        given = {
            "members_file": self.members_file,
            "membership.dns": self.membership.dns.is_on,
            "membership.redis": self.membership.redis.url,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    @property
    def desired_redis(self) -> RedisMembersConfig:
        """The Redis with the desired numbers of workers; its URL is empty if there is none."""
        return self.scale.redis if self.scale.redis.url else self.membership.redis

    @property
    def may_listen(self) -> bool:
        """Whether the address is safe: clients have keys, are on this machine, or are explicitly
        allowed."""
        return self.allow_remote_clients or bool(self.tenants.file) or is_loopback(self.host)

    def __post_init__(self) -> None:
        if len(self.sources) > 1:
            raise SettingError(
                f"{' and server.'.join(self.sources)} are set, but a server has one source of "
                "workers; remove the others"
            )
        if self.membership.dns.is_on and len(self.models) > 1:
            raise SettingError(
                f"membership.dns is set for {len(self.models)} models, but DNS does not say which "
                "model a worker has; use membership.redis or members_file"
            )
        require(
            0 <= self.drain_timeout_s <= DAY_S,
            "drain_timeout_s",
            self.drain_timeout_s,
            f">= 0 and <= {DAY_S:.0f}, a day: the timer that ends the process takes no infinity",
        )
        if self.hosts.advertised_url and not self.tenants.quotas.is_shared:
            raise SettingError("hosts needs a Redis for all hosts: give --limits redis://HOST")
        sample_s, most = self.sample_s, f"> 0 and <= recent_s ({self.recent_s})"
        require(sample_s <= self.recent_s, "sample_s", sample_s, most)
        for network in self.trusted_proxies:
            _require_network(network)
        classes = set(self.gateway_objectives.values())
        of_gateway = "gateway_objectives"
        require(classes <= CLASS_OF_NAME.keys(), of_gateway, classes, ", ".join(CLASS_OF_NAME))
        for origin in self.allow_origins:
            _require_origin(origin)
        if not self.may_listen:
            raise SettingError(
                f"host is {self.host!r}: every machine that reaches it "
                "could use this server; give --tenants FILE, or bind 127.0.0.1 (and put a proxy "
                "with authentication in front), or give --allow-remote-clients"
            )

"""Settings of the server: what it serves, connections, streams, kept answers; with reasons."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from typing import Annotated, Final, Literal

from msgspec import Meta

from ..errors import SettingError
from ..loopback import is_loopback
from ..units import KIB, MIB, MILLISECONDS, SECONDS
from .adapters import AdapterConfig  # noqa: TC001 (get_type_hints reads the annotations)
from .auto import AutoConfig
from .limits import Count, CountOrZero, NotNegative, Positive, require
from .link import LinkConfig
from .models import ServedModelConfig  # noqa: TC001 (get_type_hints reads the annotations)
from .parsers import ReasoningParser, ToolParser
from .responses import StoredResponsesConfig
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
    """One server among several that share a port.

    The kernel gives each new connection to one of them; what is asked of all of them, such as the
    metrics, the one that was asked puts together.
    """

    name: str
    """Its own, unique among them."""
    own_fd: int
    """A bound Unix socket by which this very server is reached, as `listen_fd` held by whoever
    started it."""
    paths: tuple[tuple[str, str], ...]
    """Name and path of the own socket of each, this one among them."""
    ask_timeout_s: float = 3.0 * SECONDS
    """For an answer of another one, which comes from memory, or is an audit: above
    `audit_timeout_s`. One that is being restarted is left out."""


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """Bounds on grammars that clients send, checked before a request is queued."""

    max_bytes: int = 16 * KIB
    """Of one schema, expression or grammar: what people write is far smaller."""
    max_depth: int = 32
    """Of nested brackets: compilers recurse."""
    cpu_s: float = 50 * MILLISECONDS
    """For compiling, in a process that is ended then, whatever it does. Real schemas take 1 to
    5 ms; in a worker a grammar is compiled beside running streams. Where these have every core,
    it gets a part of one, and takes as much longer by the clock."""
    walk_tokens: int = 32
    """Tokens of each walk through a compiled grammar: an ambiguous one passes every bound at its
    first token and exceeds them at some tenth one. What a walk does not reach, a worker bounds."""
    walk_cpu_s: float = 20 * MILLISECONDS
    """For all walks through one grammar; they stop there without a verdict. 0.1 ms per mask with a
    small vocabulary: a real schema's walks end before."""
    walk_mask_cpu_s: float = 30 * MILLISECONDS
    """For one mask of a walk; one that takes longer is too costly. Real ones take up to 6 ms with
    a vocabulary of 65,000 tokens (an object of 200 optional properties)."""
    memory_bytes: int = 512 * MIB
    """That compiling may take on top of what the process has."""
    max_remembered: int = 1024
    """Verdicts that are kept: clients send the same grammar again and again."""


@dataclass(frozen=True, slots=True)
class TemplateConfig:
    """Bounds on renderings by chat templates that do more than what is known to be cheap."""

    cpu_s: float = 1.0 * SECONDS
    """For compiling and rendering, in a process that is ended then. The costliest known template
    takes 50 ms for both, with a hundred turns."""
    memory_bytes: int = 512 * MIB
    """That it may take on top of what the process has: a text of 64 MiB, in pieces and as a
    whole."""
    max_bytes: int = 64 * MIB
    """Of the text: four times the largest request body. Templates repeat little."""


@dataclass(frozen=True, slots=True)
class TurnsConfig:
    """Lines for the processes that parse, render, tokenise and compile: one line for each tenant,
    or for each client address where there are no tenants (server/text/turns.py)."""

    max_waiting: Count = 4096
    """Jobs that wait in all lines: as many as there may be connections."""
    max_waiting_each: Count = 1024
    """Jobs of one tenant or address that wait: as many requests as one class may have queued. The
    next one gets a 429, and jobs of others do not notice."""
    recent_s: NotNegative = 10.0 * SECONDS
    """So long after the last job of any other key a key leaves one process free: a running job
    is not interrupted, and the largest conversations take a second. With one key alone all
    processes are used."""


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """What is decided on a request before its body is read (server/api/door.py)."""

    max_body_bytes: Count = 256 * MIB
    """Of all bodies that are being received, or wait to be parsed and tokenised: a sixteenth of a
    machine with 4 GiB. Beyond it a large body gets a 503 before it is read."""
    max_body_bytes_each: Count = 64 * MIB
    """Of one tenant, or of one address where there are no tenants: four bodies of the largest size,
    and a quarter of `max_body_bytes`, so that four have to come together to fill it. Beyond it a
    large body gets a 429 before it is read."""
    small_body_bytes: Count = 64 * KIB
    """Bodies up to here are counted and never refused, so that large ones keep no ordinary question
    out. As many as there may be connections hold 256 MiB."""
    body_retry_s: Positive = 1.0 * SECONDS
    """When to come again with a body for which there is no room: most arrive within a second."""
    refusals_per_s: Positive = 20.0
    """Requests of one tenant or address that are refused at the door at once, and in each second.
    More of them wait for their answer: a client that comes again the moment it is refused would
    take the event loop's time from others, at a millisecond a refusal."""
    max_refusal_wait_s: NotNegative = 2.0 * SECONDS
    """The longest that a refusal waits. Clients that heed `retry-after` wait that long anyway."""
    refusals_logged_per_s: Positive = 10.0
    """Log lines about refused requests, at once and in each second, by the application and by the
    edge each: enough to see what a misconfigured client does, and 20 MB in an hour of attack."""


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """The file of tenants."""

    file: str | None = None
    """None where there are no tenants: then every client that reaches the port is let in."""
    poll_s: float = 1.0 * SECONDS
    """How often the file is checked for a change; a change counts when it has stood for one
    more look, because an editor may be halfway through it. So a key is shut out within 2 s."""
    max_bytes: int = 8 * MIB
    """Of the file: some 20 times what the largest number of tenants takes. Parsing it takes
    seconds of a thread."""
    quotas: QuotaConfig = field(default_factory=QuotaConfig)
    """Where the accounts of their use are kept."""


BACKGROUND_WINDOW: Final = 4
"""Tokens that a line may run ahead: so soon it stands still when an interactive request comes."""


BACKGROUND_HOLD_S: Final = 0.5 * SECONDS
"""For which it stands still at most: it holds a row and blocks, which may be what the interactive
request waits for. Under a flood a line so goes on by a window in each of these, and one that has
not begun joins the queue after it."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Files and batches."""

    directory: str | None = None
    """Where the database is; None for none: files and batches are then not served. Off by default,
    because what outlives a process shall be where its operator wants it."""
    max_total_bytes: int = 1024 * MIB
    """Of all files, results included. Beyond it nothing more is taken; a batch under way ends its
    lines with errors."""
    max_files: int = 1000
    """That are kept at once."""
    max_open_batches: int = 100
    """That have not ended."""
    owner_share: float = 0.25
    """Of each of the three: the most that one tenant may have, so that none of a few shuts all
    others out. Without tenants there is no other to share with."""
    max_lines: int = 50_000
    """Of one batch: as many as the API's own."""
    concurrency: Count = 4
    """Lines at once. More would fill rows that interactive requests want, and a line that is held
    back holds its blocks."""
    lease_s: float = 5.0 * SECONDS
    """Of several servers one runs batches; when nothing is heard of it for this long, another does.
    It says so every third of that: lines of a server that stands still for longer are computed
    again."""
    poll_s: float = 0.5 * SECONDS
    """How often work is looked for where nothing happens."""
    max_line_attempts: int = 8
    """For answers that say "later" (503, 504). A fleet that restarts takes seconds."""
    paused_s: float = 5.0 * SECONDS
    """For which a line that has not begun stays in the queue while batches are paused. It holds
    part of its tenant's limits there, of which the tenant's own requests may be in want; a
    brownout that ends sooner costs it nothing."""
    retry_s: float = 1.0 * SECONDS
    """Before the second attempt; doubled for each further one."""
    min_free_bytes: int = 64 * MIB
    """On the disk with the database: below it no line begins. The lines under way and the renewals
    of the lease have room to be written then, and other writers of that disk some time."""
    max_held_retry_s: float = 5.0 * SECONDS
    """How often at least it is tried to write an answer that the database has refused, from
    `retry_s` on. Until then it is held in memory, with the place of its line, so that never more
    than `concurrency` are."""

    def most_of(self, owner: str, most: int) -> int:
        """Return what one owner may have of a bound."""
        return max(1, int(most * self.owner_share)) if owner else most


@dataclass(frozen=True, slots=True)
class ResumeConfig:
    """Bounds of what a client may come back to."""

    ttl_s: float = 600 * SECONDS
    """How long a finished answer is kept: longer than the official clients go on retrying."""
    grace_s: float = 30 * SECONDS
    """How long an answer without a reader goes on: a client that changes networks or restarts is
    back by then. It holds a row and KV meanwhile, so not for longer."""
    away_grace_s: float = 5 * SECONDS
    """The same where the client closed the connection because it goes away (1001), as browsers do:
    a page that is loaded again is back within a second, and a closed tab should hold nothing."""
    buffer_bytes: int = 1 * MIB
    """Of one answer. Beyond, its beginning is forgotten, as far as it was read: 4,000
    chunks of a token each."""
    ahead_bytes: int = 64 * KIB
    """How far an answer runs ahead of its fastest reader; then the tokens wait where they do
    for every client, and so does their credit."""
    max_live: int = 64
    """Answers under way at once; the next is refused with 503."""
    owner_share: float = 0.25
    """Of these: the most that one tenant may have."""
    max_kept: int = 4096
    """Answers in all; beyond it the oldest finished one of the tenant with the most gives way."""
    max_kept_bytes: int = 64 * MIB
    """Of all finished ones together; beyond it the oldest of the tenant with the most bytes."""
    sweep_s: float = 1 * SECONDS
    """How often it is looked whether a time is over."""


@dataclass(frozen=True, slots=True)
class ResponseCacheConfig:
    """Bounds of the response cache."""

    max_bytes: CountOrZero = 0
    """Of all answers of one server, tenants' shares of it as in their prefix caches; 0 keeps none,
    because an operator has to want that answers stay in memory after their clients have gone."""
    ttl_s: NotNegative = 300 * SECONDS
    """An answer is the same for ever; this is how long a client's words may be found in memory."""
    max_answer_bytes: int = 256 * KIB
    """A longer one is not kept: some 7,000 tokens that come one by one, or 400 with 20
    alternatives each. Nor is one of more than an eighth of all."""

    @property
    def most_answer_bytes(self) -> int:
        """Bytes of the largest answer that is kept."""
        return min(self.max_answer_bytes, self.max_bytes // 8)


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

    model_dir: str = ""
    """Absolute path of the model; filled in from `fleet.model`."""
    model_name: str = ""
    """What clients call the model; empty for the name of its directory."""
    prefill_addresses: tuple[str, ...] = ()
    """Control addresses of prefill workers, those of `spare_addresses` included."""
    decode_addresses: tuple[str, ...] = ()
    """Control addresses of decode workers, those of `spare_addresses` included."""
    model_digest: str = ""
    """sha256:… of the model's version in the store; empty for a directory that is not in one."""
    compute_digest: str = ""
    """sha256:… of the part of the version that decides bits; its workers have the same one. Empty
    for a directory that is in no store."""
    control_socket: str | None = None
    """Where the fleet's control is reached, which loads and ends models; none where the workers of
    all models run all the time."""
    model_adapters: tuple[AdapterConfig, ...] = ()
    """LoRA adapters of the model; filled in from `fleet.adapters`."""
    unnamed_adapters: tuple[AdapterConfig, ...] = ()
    """Adapters that workers may have besides, and no request may name: one that is being loaded or
    unloaded; `triolet serve` fills it in."""
    models: tuple[ServedModelConfig, ...] = ()
    """Every model where there are several; empty for the one that the fields above describe."""
    model_aliases: tuple[str, ...] = ()
    """Other names that requests may use for the model; `*` accepts every name but
    `NAME:ADAPTER` with the name of a model. Tools with a fixed name work unchanged then."""
    auto: AutoConfig = field(default_factory=AutoConfig)
    """Which model answers a request that leaves it open."""
    strict_requests: bool = False
    """Whether a parameter that is not known is refused. Otherwise it is ignored and named in the
    answer's `x-triolet-ignored`: clients of other servers send their extensions."""
    tool_parser: ToolParser = ToolParser.AUTO
    """How calls of tools are told from text. Told by the model's chat template unless it is named,
    for a template that says nothing of calls, or names tokens of another family. Where the template
    shows no tools, `generic_tools` goes before it."""
    generic_tools: bool = True
    """Whether a model whose chat template shows no tools is told of them in its system prompt, and
    held to their schemas by a grammar. Otherwise `tools` are refused there unless a call is
    demanded: for clients that put tools into their own prompt, and prompts that nothing changes."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 8000
    """Port to listen on; 0 takes any free one."""
    link: LinkConfig = field(default_factory=LinkConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
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
    grammar: GrammarConfig = field(default_factory=GrammarConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    curve_dir: str | None = None
    """Key directory (`triolet keys make`); required for any tcp address."""
    token_window: Count = 64
    """Tokens a stream may run ahead of what its client has read (back-pressure)."""
    stall_timeout_s: Positive = 10.0 * SECONDS
    """A client that reads nothing for this long while tokens wait loses its stream."""
    keep_alive_s: float = 10.0 * SECONDS
    """SSE comment interval, from the moment a request is queued; below every proxy's idle limit."""
    default_deadline_s: float = 600.0 * SECONDS
    """A request that names no deadline ends here: nothing may live for ever."""
    max_queued_requests: CountOrZero = 1024
    """Requests of a class and those above it that wait for a worker: a flood of lower classes fills
    none of it. Where it is full, a tenant still has a place while it has less than its part by
    weight. About 8 KiB each plus their prompt."""
    worker_wait_s: float = 30.0 * SECONDS
    """How long requests are kept while no worker of a role is there: a restart with loading of the
    model. Beyond, they are refused with 503."""
    max_attempts: int = 3
    """One try and two retries that get a request nowhere. A request that gets 16 tokens on between
    two faults begins to count anew: the death of a worker shall cost a pause, not an answer."""
    max_connections: Count = 4096
    """Client connections; where all are busy the next gets a 503 and is closed. Below the usual fd
    limit of 8192."""
    max_connections_per_address: Count | None = None
    """Of one client address, of IPv6 one /64; None for half of `max_connections`. So no address
    holds all places, and a load test from one machine has two thousand. Beyond it an address's own
    idle connections give way. Peers in `trusted_proxies` are counted in the total only."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks (CIDR) of proxies that may name the client that they ask for, by PROXY protocol v2,
    `Forwarded` or `X-Forwarded-For`. None by default: any client could claim any address."""
    allow_origins: tuple[str, ...] = ()
    """Origins of pages that may use the API from a browser (CORS); `*` is every one. None by
    default: without keys any page that the user opens could ask. The chat page needs none."""
    preflight_max_age_s: CountOrZero = 7200
    """How long a browser may keep the answer to a preflight; the longest that Chromium takes. What
    it permits is checked with every request all the same."""
    requests_per_turn: Count = 2
    """Requests that begin in one turn of the event loop; the others wait for the next turns. One
    that is read and refused at once costs up to 5 ms, and a probe of liveness takes ten turns: so
    it is answered within 100 ms in any crowd. A refused small request costs less processor time
    than without the bound (1.41 ms for 1.66, 40 connections)."""
    listen_backlog: int = 1024
    """Connections the kernel holds during a burst; hypercorn's default of 100 drops some."""
    max_body_bytes: Count = 16 * MIB
    """Of one request; a prompt of 1M tokens is some 4 MB of text."""
    free_chunks: int = 1024
    """Chunks of one request's body whatever their size: clients that stream JSON send each number
    or name as a chunk, and so many cost 0.1 s of the processor."""
    min_chunk_bytes: Count = 64
    """Beyond `free_chunks` a body may have one more chunk for each so many bytes. A chunk costs
    90 microseconds, so 64 bytes in a chunk cost less than 64 bytes of small requests, and a client
    that uploads 16 MiB in chunks of 64 bytes is served; smaller ones get a 400."""
    max_header_bytes: int = 16 * 1024
    """Of one request's line and headers: they are read before anything is known of the client."""
    max_header_fields: int = 64
    """Header lines of one request."""
    header_timeout_s: float = 10.0 * SECONDS
    """Request line and headers must be in by then."""
    body_timeout_s: float = 60.0 * SECONDS
    """A body may take this long from its first byte, whatever its rate."""
    body_grace_s: float = 10.0 * SECONDS
    """A body may take this long whatever its size; beyond, `body_min_bytes_per_s` counts."""
    body_min_bytes_per_s: float = 1024.0
    """No honest client on any network is slower; what is slower holds a connection for nothing."""
    send_buffer_bytes: int = 128 * KIB
    """What the kernel may hold for one client that does not read: with the token window it bounds
    how far an answer runs ahead of its reader."""
    allow_remote_clients: bool = False
    """Without tenants every client that reaches the port may use it. Binding to anything but
    loopback has to be meant."""
    tenants: TenantsConfig = field(default_factory=TenantsConfig)
    max_choices: int = 8
    """`n`: answers to one prompt."""
    max_prompts: int = 32
    """Prompts in one request for completions; with `max_choices` at most 256 sequences."""
    reasoning_parser: ReasoningParser = ReasoningParser.AUTO
    """How the model's reasoning is told from its answer. Found by the tokenizer's markers unless it
    is named: `none` shows all as text."""
    metrics_compat: Literal["vllm", "none"] = "vllm"
    """The server with names that the metrics also go by, so that existing dashboards work; `none`
    for none."""
    idle_connection_s: float = 75.0 * SECONDS
    """Keep-alive; longer than the 60 s idle time of common load balancers, so that they close
    first and no request meets a closing socket."""
    tcp_user_timeout_s: float = 11.0 * SECONDS
    """The kernel drops a peer that acknowledges nothing, or leaves its window shut, for this long,
    but not before `stall_timeout_s` has ended its streams, by whose clock it is known why."""
    text_processes: Count = 2
    """Processes that parse, render, tokenise and compile what is not small, at a lower priority
    than workers on the same machine. With two, one client's longest job leaves one to others."""
    text_timeout_s: Positive = 10.0 * SECONDS
    """How long a job of theirs may wait and take: the largest conversations take a second. A
    process that has not answered then is ended."""
    text_start_s: float = 120.0 * SECONDS
    """For each step of a new one's start: seconds of a core, of which it may get a quarter."""
    ws_ping_s: float = 15.0 * SECONDS
    """Interval of pings on a WebSocket; below every proxy's idle limit."""
    ws_pong_timeout_s: float = 30.0 * SECONDS
    """A WebSocket from which nothing came for this long is closed: two pings without an answer."""
    ws_max_message_bytes: int = 1 * MIB
    """Of one message of a client."""
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
    sample_s: Positive = 2.0 * SECONDS
    """How often the counters are kept for that: sixteen copies of two histograms."""
    audit_timeout_s: float = 1.0 * SECONDS
    """An audit waits for its workers this long. A live one answers between two frames; below
    `peer_timeout_s`, so that a worker which is listed as silent is not simply dead."""
    max_audits: int = 8
    """Audits at once; each asks every worker."""
    drain_timeout_s: float = 30.0 * SECONDS
    """After SIGTERM running streams may finish for this long, then each gets a terminal event."""
    listen_fd: int | None = None
    """A bound socket that the parent of this process holds too: it outlives the process, so that
    a successor can accept on it before this one has ended."""
    peers: PeerServersConfig | None = None
    """Other servers on the same port; None where this is the only one."""
    handover_s: float = 1.0 * SECONDS
    """After a successor has taken over the port, requests on connections that are open already are
    still answered for this long: a client in full swing learns with its next answer that it should
    connect anew."""
    spare_addresses: tuple[str, ...] = ()
    """Those of the workers' addresses where usually no worker is: a worker is there only while
    another one is replaced."""
    members_file: str | None = None
    """File that names the workers, where these change while the server runs; None, or a file that
    is not there yet, for the workers of the addresses above."""
    members_poll_s: Positive = 250 * MILLISECONDS
    """How often it is looked at: a new worker takes longer to start."""
    exit_grace_s: float = 5.0 * SECONDS
    """After the drain the process leaves within this time, whatever a socket does."""

    @property
    def of_models(self) -> tuple[ServerConfig, ...]:
        """This configuration as it is for each model: as if that were the only one."""
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
            )
            for one in self.models
        ) or (self,)

    @property
    def address_connections(self) -> int:
        """Connections that one client address may have."""
        return self.max_connections_per_address or max(1, self.max_connections // 2)

    @property
    def may_listen(self) -> bool:
        """Whether clients that reach the address have keys, are of this machine, or are meant."""
        return self.allow_remote_clients or bool(self.tenants.file) or is_loopback(self.host)

    def __post_init__(self) -> None:
        require(
            0 <= self.drain_timeout_s <= DAY_S,
            "drain_timeout_s",
            self.drain_timeout_s,
            f">= 0 and <= {DAY_S:.0f}, a day: the timer that ends the process takes no infinity",
        )
        sample_s, most = self.sample_s, f"> 0 and <= recent_s ({self.recent_s})"
        require(sample_s <= self.recent_s, "sample_s", sample_s, most)
        for network in self.trusted_proxies:
            _require_network(network)
        for origin in self.allow_origins:
            _require_origin(origin)
        if not self.may_listen:
            raise SettingError(
                f"host is {self.host!r}, which other machines can reach, and whoever does "
                "could use this server: give --tenants FILE, or bind 127.0.0.1 (and put a proxy "
                "with authentication in front), or give --allow-remote-clients"
            )

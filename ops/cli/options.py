"""The options that commands share, and the configuration that each group of them becomes.

Defaults come from triolet/config; reasons for them are there. Reads no file and no environment.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec
import typer

from triolet.config import (
    ANY_MODEL,
    DAY_S,
    LOOKUP,
    MEMORY,
    NO_GUESSES,
    BatchConfig,
    Dtype,
    EmbeddingConfig,
    EngineConfig,
    GpuConfig,
    KvWire,
    LendingConfig,
    LinkConfig,
    LocalPrefill,
    MemorySharing,
    ReasoningParser,
    ResponseCacheConfig,
    RoutingConfig,
    ServerConfig,
    SiblingConfig,
    SpeculationConfig,
    ToolParser,
    WeightFormat,
    WireConfig,
    WorkerConfig,
)
from triolet.errors import ConfigError

from ..quantities import parse_size, show_size
from ..supervisor.placement import Pinning
from .tenant_options import (
    LimitsOption,
    LimitsTimeoutOption,
    SpendFileOption,
    TenantsOption,
    tenants_config,
)

_T = TypeVar("_T")

WORKER_DRAIN_S: Final = WorkerConfig("", "", "").drain_timeout_s
_ENGINE: Final = EngineConfig()
_GPU: Final = GpuConfig()
_LINK: Final = LinkConfig()
_GUESSES: Final = SpeculationConfig()
_SERVER: Final = ServerConfig(
    model_dir="", model_name="", prefill_addresses=(), decode_addresses=()
)
DEFAULT_HOST: Final = _SERVER.host
DEFAULT_PORT: Final = _SERVER.port

_COMPUTE: Final = "Model and compute"
_HTTP: Final = "Server"
_FLEET: Final = "Processes and links"
_compute = partial(typer.Option, rich_help_panel=_COMPUTE)
_http = partial(typer.Option, rich_help_panel=_HTTP)
_fleet = partial(typer.Option, rich_help_panel=_FLEET)

ModelArgument: TypeAlias = Annotated[
    Path | None,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face directory, GGUF file, demo, smollm2, or auto: smollm2 if it can be had.",
        show_default="the demo model",
    ),
]
LogLevelOption: TypeAlias = Annotated[
    str | None,
    _fleet(help="debug, info, warning or error.", show_default="info; warning on a terminal"),
]
KvPlaintextOption: TypeAlias = Annotated[
    bool,
    _fleet(
        "--kv-plaintext",
        help="KV over tcp unencrypted, each chunk with a MAC: in a trusted network; both sides.",
    ),
]
CurveOption: TypeAlias = Annotated[
    Path | None, _fleet(help="Key directory (see `triolet keys make`).")
]
RolesOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(help="server, prefill or decode; repeatable.", show_default="all"),
]
FleetPortOption: TypeAlias = Annotated[
    int | None, typer.Option(min=1, max=65_535, help="Of the fleet, if several run here.")
]
DrainDeadlineOption: TypeAlias = Annotated[
    float,
    typer.Option(
        min=0.0, max=DAY_S, help="Seconds until what still runs there moves to other workers."
    ),
]
WorkerDrainOption: TypeAlias = Annotated[
    float,
    _fleet(min=0.0, max=DAY_S, help="Seconds that sequences may finish on a worker that leaves."),
]
SupervisorPidOption: TypeAlias = Annotated[int | None, typer.Option(hidden=True)]
SiblingsOption: TypeAlias = Annotated[str | None, typer.Option(hidden=True)]
LendingOption: TypeAlias = Annotated[str | None, typer.Option(hidden=True)]
ServersOption: TypeAlias = Annotated[
    int, _fleet(help="Server processes that share the port; each can fill a core.")
]
WorkerNameOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Name in the fleet.", show_default="role and process id")
]

RemoteClientsOption: TypeAlias = Annotated[
    bool, _http("--allow-remote-clients", help="Listen beyond this machine without tenants.")
]
ModelNameOption: TypeAlias = Annotated[
    list[str] | None,
    _http(
        help="What clients call the model; repeatable: further ones are aliases, * is any name.",
        show_default="the directory's name",
    ),
]
StrictOption: TypeAlias = Annotated[
    bool, _http("--strict-requests", help="Refuse parameters that are not known.")
]
ToolParserOption: TypeAlias = Annotated[
    ToolParser, _http(help="How the model's calls of tools are told from its text.")
]
MaxConnectionsOption: TypeAlias = Annotated[int, _http(min=1, help="Client connections.")]
StallTimeoutOption: TypeAlias = Annotated[
    float, _http(help="Seconds after which a client that reads nothing is cut off.")
]
TokenWindowOption: TypeAlias = Annotated[int, _http(help="Tokens a stream may run ahead.")]
MetricsCompatOption: TypeAlias = Annotated[
    str, _http(help="Second names of metrics: vllm or none.")
]
DrainTimeoutOption: TypeAlias = Annotated[
    float, _http(help="Seconds that streams may finish after SIGTERM.")
]
ReasoningParserOption: TypeAlias = Annotated[
    ReasoningParser, _http(help="How the model's reasoning is told from its answer.")
]
MaxPerAddressOption: TypeAlias = Annotated[
    int | None,
    _http(min=1, help="Connections of one client address.", show_default="half of all"),
]
TrustedProxiesOption: TypeAlias = Annotated[
    str,
    _http(
        metavar="CIDR[,CIDR]",
        help="Networks of proxies that may name the client that they ask for.",
        show_default="none",
    ),
]
AllowOriginOption: TypeAlias = Annotated[
    list[str] | None,
    _http(
        metavar="ORIGIN",
        help="Origin whose pages may use the API from a browser; repeatable; * is any.",
        show_default="none",
    ),
]
PinOption: TypeAlias = Annotated[
    Pinning, _fleet(help="auto: give decode workers cores of their own, if one is left (Linux).")
]
DtypeOption: TypeAlias = Annotated[
    Dtype | None,
    _compute(
        help="Weights, activations and KV.",
        show_default="float32; bfloat16 if quantised; on a GPU the checkpoint's own",
    ),
]
ThreadsOption: TypeAlias = Annotated[
    int | None,
    _compute(help="CPU threads of each worker.", show_default="cores divided among local workers"),
]
EmbeddingBatchOption: TypeAlias = Annotated[
    int, _compute(min=1, help="Tokens of a batch of inputs for embeddings; 1: one by one.")
]
EmbeddingWaitOption: TypeAlias = Annotated[
    float,
    _compute(min=0.0, max=1.0, help="Seconds that an input for embeddings may wait for others."),
]
BatchDirOption: TypeAlias = Annotated[
    Path | None,
    _http(help="Keep files and batches there, and run batches.", show_default="keep none"),
]
BatchConcurrencyOption: TypeAlias = Annotated[
    int, _http(min=1, help="Lines of batches at once, behind all other requests.")
]
ResponseCacheOption: TypeAlias = Annotated[
    str,
    _http(help="Memory for answers that are given again to who asks for that; 0 keeps none."),
]
ResponseCacheTtlOption: TypeAlias = Annotated[
    float, _http(min=0.0, help="Seconds that an answer may be given again.")
]
LocalPrefillOption: TypeAlias = Annotated[
    LocalPrefill,
    _fleet(
        help="Whether decode computes prompts itself: off, auto (short ones, and all while "
        "no prefill worker is there) or always."
    ),
]
MaxLocalTokensOption: TypeAlias = Annotated[
    int, _fleet(min=0, help="Longest prompt, without what is cached, that auto lets decode have.")
]
PoisonOption: TypeAlias = Annotated[
    bool,
    _compute("--poison-freed-blocks", help="Fill freed blocks with NaN, to find bugs in Triolet."),
]
PromptChunkOption: TypeAlias = Annotated[
    int, _compute(min=1, help="Prompt tokens per decode step, beside running streams.")
]
TargetStepOption: TypeAlias = Annotated[
    float, _compute(min=0.001, max=DAY_S, help="Seconds that a step with prompts should take.")
]


def read_siblings(text: str | None) -> SiblingConfig | None:
    """Return what a supervisor tells one of several servers, as JSON.

    Raises:
      ConfigError: it is something else.
    """
    return _told("--siblings", text, SiblingConfig)


def read_lending(text: str | None) -> LendingConfig | None:
    """Return what a supervisor tells a worker of others that share the cores, as JSON.

    Raises:
      ConfigError: it is something else.
    """
    return _told("--lending", text, LendingConfig)


def _told(option: str, text: str | None, kind: type[_T]) -> _T | None:
    if text is None:
        return None
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{option} is for supervisors, and not understood: {error}") from None


def engine_options(
    dtype: DtypeOption = _ENGINE.dtype,
    weights: Annotated[
        WeightFormat, _compute(help="Kept as dtype, or rounded to int8 (native only).")
    ] = _ENGINE.weights,
    backend: Annotated[
        str, _compute(help="auto, native (CPU), sdpa, or triton or flash (NVIDIA).")
    ] = _ENGINE.backend,
    device: Annotated[str, _compute(help="cpu, cuda or cuda:N.")] = _ENGINE.device,
    block_size: Annotated[int, _compute(help="Tokens per KV block.")] = _ENGINE.block_size,
    kv_pool: Annotated[str, _compute(help="KV pool of each worker.")] = show_size(
        _ENGINE.kv_pool_bytes
    ).replace(" ", ""),
    max_num_seqs: Annotated[
        int, _compute(help="Sequences per decode step.")
    ] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, _compute(help="Prompt tokens per prefill step.")
    ] = _ENGINE.max_num_batched_tokens,
    prompt_chunk: PromptChunkOption = _ENGINE.prompt_chunk_tokens,
    target_step: TargetStepOption = _ENGINE.target_step_s,
    embedding_batch: EmbeddingBatchOption = _ENGINE.embedding.max_batch_tokens,
    embedding_wait: EmbeddingWaitOption = _ENGINE.embedding.max_wait_s,
    max_model_len: Annotated[
        int | None, _compute(help="Context length.", show_default="the model's own")
    ] = _ENGINE.max_model_len,
    threads: ThreadsOption = _ENGINE.threads,
    no_prefix_cache: Annotated[
        bool, _compute("--no-prefix-cache", help="Keep no KV for prompts that begin alike.")
    ] = not _ENGINE.prefix_cache,
    kv_wire: Annotated[
        KvWire, _compute(help="KV on its way to decode: int8 rounds it, for slow links.")
    ] = _ENGINE.kv_wire,
    host_cache: Annotated[
        str, _compute(help="Host memory of each worker for KV that its pool cannot keep.")
    ] = show_size(_ENGINE.host_cache_bytes).replace(" ", ""),
    poison_freed_blocks: PoisonOption = _ENGINE.poison_freed_blocks,
) -> EngineConfig:
    """Return what a worker computes with."""
    return EngineConfig(
        dtype=dtype,
        weights=weights,
        backend=backend,
        device=device,
        block_size=block_size,
        kv_pool_bytes=parse_size(kv_pool),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prompt_chunk_tokens=prompt_chunk,
        target_step_s=target_step,
        max_model_len=max_model_len,
        threads=threads,
        prefix_cache=not no_prefix_cache,
        kv_wire=kv_wire,
        host_cache_bytes=parse_size(host_cache),
        poison_freed_blocks=poison_freed_blocks,
        embedding=EmbeddingConfig(embedding_batch, embedding_wait),
    )


def gpu_options(
    no_cuda_graphs: Annotated[
        bool, _compute("--no-cuda-graphs", help="Launch a GPU's decode steps kernel by kernel.")
    ] = not _GPU.cuda_graphs,
    fixed_batch: Annotated[
        bool, _compute("--fixed-batch", help="Pad a GPU's decode steps to one number of rows.")
    ] = _GPU.fixed_batch,
    pinned_memory: Annotated[
        str, _compute(help="Host memory through which KV enters a GPU.")
    ] = show_size(_GPU.pinned_bytes).replace(" ", ""),
) -> GpuConfig:
    """Return how a worker uses its GPU."""
    return GpuConfig(
        cuda_graphs=not no_cuda_graphs,
        fixed_batch=fixed_batch,
        pinned_bytes=parse_size(pinned_memory),
    )


def speculation_options(
    speculate: Annotated[
        str,
        _compute(
            metavar="off|lookup|DIR",
            help="Guess coming tokens: from the text so far, or with a draft model.",
        ),
    ] = _GUESSES.source,
    speculate_guesses: Annotated[
        int, _compute(help="Guesses of one sequence in one step.")
    ] = _GUESSES.max_guesses,
    speculate_step_tokens: Annotated[
        int, _compute(help="Sequences and guesses of a step together; beyond, nobody guesses.")
    ] = _GUESSES.max_step_tokens,
) -> SpeculationConfig:
    """Return how decode guesses ahead.

    Raises:
      ConfigError: neither a word that is known nor a model's directory.
    """
    if speculate not in (NO_GUESSES, LOOKUP):
        if not (Path(speculate) / "config.json").is_file():
            raise ConfigError(
                f"speculate is {speculate!r}; allowed: off, lookup, or the directory of a draft "
                "model (there is no config.json)"
            )
        speculate = str(Path(speculate).resolve())
    return SpeculationConfig(
        source=speculate, max_guesses=speculate_guesses, max_step_tokens=speculate_step_tokens
    )


def link_options(
    peer_timeout: Annotated[
        float, _fleet(help="Seconds of silence until a process counts as dead.")
    ] = _LINK.peer_timeout_s,
    progress_timeout: Annotated[
        float,
        _fleet(help="Seconds that one step may take; raise it for large models on slow machines."),
    ] = _LINK.progress_timeout_s,
    lease_ttl: Annotated[
        float, _fleet(help="Seconds until KV is freed that no server names any more.")
    ] = _LINK.lease_ttl_s,
    share_kv_memory: Annotated[
        MemorySharing,
        _fleet(help="Workers of one host read KV where prefill has put it, not from a socket."),
    ] = _LINK.wire.share_memory,
    kv_layer_groups: Annotated[
        int, _fleet(min=1, help="Parts of a prefill step whose KV leaves while it runs.")
    ] = _LINK.wire.layer_groups,
    kv_layer_group_min_tokens: Annotated[
        int, _fleet(min=1, help="Only chunks of prompts with so many tokens go by parts.")
    ] = _LINK.wire.layer_group_min_tokens,
) -> LinkConfig:
    """Return the deadlines between processes, and how KV travels."""
    return LinkConfig(
        peer_timeout_s=peer_timeout,
        progress_timeout_s=progress_timeout,
        lease_ttl_s=lease_ttl,
        wire=WireConfig(share_kv_memory, kv_layer_groups, kv_layer_group_min_tokens),
    )


def _served_names(given: list[str] | None) -> tuple[str, tuple[str, ...]]:
    """Return the model's name, empty for its directory's, and its aliases."""
    names = [name for name in dict.fromkeys(given or ()) if name != ANY_MODEL]
    any_name = (ANY_MODEL,) if ANY_MODEL in (given or ()) else ()
    return (names[0] if names else ""), (*names[1:], *any_name)


def server_options(
    host: Annotated[str, _http(help="Address to listen on.")] = _SERVER.host,
    port: Annotated[int, _http(min=0, max=65_535, help="0 is any free one.")] = _SERVER.port,
    allow_remote_clients: RemoteClientsOption = _SERVER.allow_remote_clients,
    tenants: TenantsOption = None,
    limits: LimitsOption = MEMORY,
    limits_timeout: LimitsTimeoutOption = _SERVER.tenants.quotas.call_timeout_s,
    spend_file: SpendFileOption = None,
    model_name: ModelNameOption = None,
    strict_requests: StrictOption = _SERVER.strict_requests,
    tool_parser: ToolParserOption = _SERVER.tool_parser,
    token_window: TokenWindowOption = _SERVER.token_window,
    stall_timeout: StallTimeoutOption = _SERVER.stall_timeout_s,
    drain_timeout: DrainTimeoutOption = _SERVER.drain_timeout_s,
    max_queued_requests: Annotated[
        int, _http(min=0, help="Requests that wait.")
    ] = _SERVER.max_queued_requests,
    max_connections: MaxConnectionsOption = _SERVER.max_connections,
    max_connections_per_address: MaxPerAddressOption = None,
    trusted_proxies: TrustedProxiesOption = "",
    allow_origin: AllowOriginOption = None,
    local_prefill: LocalPrefillOption = _SERVER.routing.local_prefill,
    max_local_tokens: MaxLocalTokensOption = _SERVER.routing.max_local_tokens,
    batch_dir: BatchDirOption = None,
    batch_concurrency: BatchConcurrencyOption = _SERVER.batches.concurrency,
    response_cache: ResponseCacheOption = "0",
    response_cache_ttl: ResponseCacheTtlOption = _SERVER.response_cache.ttl_s,
    metrics_compat: MetricsCompatOption = _SERVER.metrics_compat,
    reasoning_parser: ReasoningParserOption = _SERVER.reasoning_parser,
) -> ServerConfig:
    """Return the front's settings; its model and workers are filled in by the command."""
    return ServerConfig(
        model_dir="",
        model_name=_served_names(model_name)[0],
        model_aliases=_served_names(model_name)[1],
        strict_requests=strict_requests,
        tool_parser=tool_parser,
        prefill_addresses=(),
        decode_addresses=(),
        host=host,
        port=port,
        allow_remote_clients=allow_remote_clients,
        tenants=tenants_config(tenants, limits, limits_timeout, spend_file),
        token_window=token_window,
        stall_timeout_s=stall_timeout,
        drain_timeout_s=drain_timeout,
        max_queued_requests=max_queued_requests,
        max_connections=max_connections,
        max_connections_per_address=max_connections_per_address,
        trusted_proxies=tuple(network for network in trusted_proxies.split(",") if network),
        allow_origins=tuple(dict.fromkeys(allow_origin or ())),
        metrics_compat=metrics_compat,
        reasoning_parser=reasoning_parser,
        batches=BatchConfig(
            None if batch_dir is None else str(batch_dir.absolute()), concurrency=batch_concurrency
        ),
        response_cache=ResponseCacheConfig(parse_size(response_cache), response_cache_ttl),
        routing=RoutingConfig(local_prefill=local_prefill, max_local_tokens=max_local_tokens),
    )

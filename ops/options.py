"""The options that commands share, and the configuration that each group of them becomes.

Defaults come from triolet/config.py; reasons for them are there. Reads no file and no environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from triolet.config import Dtype, EngineConfig, LinkConfig, ServerConfig

from .quantities import parse_size, show_size

_ENGINE: Final = EngineConfig()
_LINK: Final = LinkConfig()
_SERVER: Final = ServerConfig(
    model_dir="", model_name="", prefill_addresses=(), decode_addresses=()
)

_COMPUTE: Final = "Model and compute"
_HTTP: Final = "Server"
_FLEET: Final = "Processes and links"

ModelArgument: TypeAlias = Annotated[
    Path | None,
    typer.Argument(metavar="MODEL", help="Hugging Face directory.", show_default="the demo model"),
]
LogLevelOption: TypeAlias = Annotated[
    str | None,
    typer.Option(
        help="debug, info, warning or error.",
        show_default="info; warning on a terminal",
        rich_help_panel=_FLEET,
    ),
]
CurveOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Key directory (see `triolet keys make`).", rich_help_panel=_FLEET),
]
SupervisorPidOption: TypeAlias = Annotated[int | None, typer.Option(hidden=True)]
WorkerNameOption: TypeAlias = Annotated[
    str | None, typer.Option(help="Name in the fleet.", show_default="role and process id")
]


def engine_options(
    dtype: Annotated[
        Dtype, typer.Option(help="Weights, activations and KV.", rich_help_panel=_COMPUTE)
    ] = _ENGINE.dtype,
    backend: Annotated[
        str,
        typer.Option(
            help="Attention: sdpa, or flash on NVIDIA with flash-attn.", rich_help_panel=_COMPUTE
        ),
    ] = _ENGINE.backend,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=_COMPUTE)
    ] = _ENGINE.device,
    block_size: Annotated[
        int, typer.Option(help="Tokens per KV block.", rich_help_panel=_COMPUTE)
    ] = _ENGINE.block_size,
    kv_pool: Annotated[
        str, typer.Option(help="KV pool of each worker.", rich_help_panel=_COMPUTE)
    ] = show_size(_ENGINE.kv_pool_bytes).replace(" ", ""),
    max_num_seqs: Annotated[
        int, typer.Option(help="Sequences per decode step.", rich_help_panel=_COMPUTE)
    ] = _ENGINE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Prompt tokens per prefill step.", rich_help_panel=_COMPUTE)
    ] = _ENGINE.max_num_batched_tokens,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Context length.", show_default="the model's own", rich_help_panel=_COMPUTE
        ),
    ] = _ENGINE.max_model_len,
    threads: Annotated[
        int | None,
        typer.Option(
            help="CPU threads of each worker.",
            show_default="cores divided among local workers",
            rich_help_panel=_COMPUTE,
        ),
    ] = _ENGINE.threads,
) -> EngineConfig:
    """Return what a worker computes with."""
    return EngineConfig(
        dtype=dtype,
        backend=backend,
        device=device,
        block_size=block_size,
        kv_pool_bytes=parse_size(kv_pool),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        threads=threads,
    )


def link_options(
    peer_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds of silence until a process counts as dead.", rich_help_panel=_FLEET
        ),
    ] = _LINK.peer_timeout_s,
    progress_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that one step may take; raise it for large models on slow machines.",
            rich_help_panel=_FLEET,
        ),
    ] = _LINK.progress_timeout_s,
    lease_ttl: Annotated[
        float,
        typer.Option(
            help="Seconds until KV is freed that no server names any more.", rich_help_panel=_FLEET
        ),
    ] = _LINK.lease_ttl_s,
) -> LinkConfig:
    """Return the deadlines between processes."""
    return LinkConfig(
        peer_timeout_s=peer_timeout, progress_timeout_s=progress_timeout, lease_ttl_s=lease_ttl
    )


def server_options(
    host: Annotated[
        str, typer.Option(help="Address to listen on.", rich_help_panel=_HTTP)
    ] = _SERVER.host,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, help="0 is any free one.", rich_help_panel=_HTTP)
    ] = _SERVER.port,
    allow_remote_clients: Annotated[
        bool,
        typer.Option(
            "--allow-remote-clients",
            help="Listen beyond this machine, although there are no API keys.",
            rich_help_panel=_HTTP,
        ),
    ] = _SERVER.allow_remote_clients,
    model_name: Annotated[
        str,
        typer.Option(
            help="What clients call the model.",
            show_default="the directory's name",
            rich_help_panel=_HTTP,
        ),
    ] = "",
    token_window: Annotated[
        int,
        typer.Option(min=1, help="Tokens a stream may run ahead.", rich_help_panel=_HTTP),
    ] = _SERVER.token_window,
    stall_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which a client that reads nothing is cut off.",
            rich_help_panel=_HTTP,
        ),
    ] = _SERVER.stall_timeout_s,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds that streams may finish after SIGTERM.", rich_help_panel=_HTTP
        ),
    ] = _SERVER.drain_timeout_s,
    max_queued_requests: Annotated[
        int, typer.Option(min=0, help="Requests that wait.", rich_help_panel=_HTTP)
    ] = _SERVER.max_queued_requests,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Client connections.", rich_help_panel=_HTTP)
    ] = _SERVER.max_connections,
    metrics_compat: Annotated[
        str, typer.Option(help="Second names of metrics: vllm or none.", rich_help_panel=_HTTP)
    ] = _SERVER.metrics_compat,
) -> ServerConfig:
    """Return the front's settings; its model and workers are filled in by the command."""
    return ServerConfig(
        model_dir="",
        model_name=model_name,
        prefill_addresses=(),
        decode_addresses=(),
        host=host,
        port=port,
        allow_remote_clients=allow_remote_clients,
        token_window=token_window,
        stall_timeout_s=stall_timeout,
        drain_timeout_s=drain_timeout,
        max_queued_requests=max_queued_requests,
        max_connections=max_connections,
        metrics_compat=metrics_compat,
    )

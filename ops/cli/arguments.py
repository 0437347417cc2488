"""Configuration back to the command line that means it: how the supervisor starts its roles.

The inverse of options.py; a test holds the two together. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from triolet.config import (
        EngineConfig,
        GpuConfig,
        LendingConfig,
        LinkConfig,
        ServerConfig,
        SpeculationConfig,
    )


def engine_arguments(config: EngineConfig) -> list[str]:
    """Return the options of a worker."""
    arguments = [
        *("--weights", config.weights.value),
        *("--backend", config.backend),
        *("--device", config.device),
        *("--block-size", str(config.block_size)),
        *("--kv-pool", str(config.kv_pool_bytes)),
        *("--max-num-seqs", str(config.max_num_seqs)),
        *("--max-num-batched-tokens", str(config.max_num_batched_tokens)),
        *("--host-cache", str(config.host_cache_bytes)),
        *("--prompt-chunk", str(config.prompt_chunk_tokens)),
        *("--target-step", str(config.target_step_s)),
        *("--kv-wire", config.kv_wire.value),
        *("--embedding-batch", str(config.embedding.max_batch_tokens)),
        *("--embedding-wait", str(config.embedding.max_wait_s)),
    ]
    if config.dtype is not None:
        arguments += ["--dtype", config.dtype.value]
    if config.max_model_len is not None:
        arguments += ["--max-model-len", str(config.max_model_len)]
    if config.threads is not None:
        arguments += ["--threads", str(config.threads)]
    if not config.prefix_cache:
        arguments.append("--no-prefix-cache")
    if config.poison_freed_blocks:
        arguments.append("--poison-freed-blocks")
    return arguments


def gpu_arguments(config: GpuConfig) -> list[str]:
    """Return how a worker uses its GPU."""
    arguments = ["--pinned-memory", str(config.pinned_bytes)]
    if not config.cuda_graphs:
        arguments.append("--no-cuda-graphs")
    if config.fixed_batch:
        arguments.append("--fixed-batch")
    return arguments


def speculation_arguments(config: SpeculationConfig) -> list[str]:
    """Return the options of a decode worker that guesses ahead."""
    return [
        *("--speculate", config.source),
        *("--speculate-guesses", str(config.max_guesses)),
        *("--speculate-step-tokens", str(config.max_step_tokens)),
    ]


def lending_arguments(config: LendingConfig | None) -> list[str]:
    """Return what a worker is told of others that share the cores with it."""
    return [] if config is None else ["--lending", msgspec.json.encode(config).decode()]


def link_arguments(config: LinkConfig) -> list[str]:
    """Return the options that every role has."""
    return [
        *("--peer-timeout", str(config.peer_timeout_s)),
        *("--progress-timeout", str(config.progress_timeout_s)),
        *("--lease-ttl", str(config.lease_ttl_s)),
        *("--kv-layer-groups", str(config.wire.layer_groups)),
        *("--kv-layer-group-min-tokens", str(config.wire.layer_group_min_tokens)),
        *("--share-kv-memory", config.wire.share_memory.value),
    ]


def server_arguments(config: ServerConfig) -> list[str]:
    """Return the options of a server, its workers' addresses included."""
    arguments = [
        *("--host", config.host),
        *("--port", str(config.port)),
        *("--model-name", config.model_name),
        *("--tool-parser", config.tool_parser.value),
        *("--token-window", str(config.token_window)),
        *("--stall-timeout", str(config.stall_timeout_s)),
        *("--drain-timeout", str(config.drain_timeout_s)),
        *("--max-queued-requests", str(config.max_queued_requests)),
        *("--max-connections", str(config.max_connections)),
        *("--metrics-compat", config.metrics_compat),
        *("--reasoning-parser", config.reasoning_parser.value),
        *("--local-prefill", config.routing.local_prefill.value),
        *("--max-local-tokens", str(config.routing.max_local_tokens)),
    ]
    if config.max_connections_per_address is not None:
        per_address = str(config.max_connections_per_address)
        arguments += ["--max-connections-per-address", per_address]
    if config.trusted_proxies:
        arguments += ["--trusted-proxies", ",".join(config.trusted_proxies)]
    for origin in config.allow_origins:
        arguments += ["--allow-origin", origin]
    arguments += ["--batch-concurrency", str(config.batches.concurrency)]
    arguments += ["--response-cache", str(config.response_cache.max_bytes)]
    arguments += ["--response-cache-ttl", str(config.response_cache.ttl_s)]
    if config.batches.directory is not None:
        arguments += ["--batch-dir", config.batches.directory]
    for alias in config.model_aliases:
        arguments += ["--model-name", alias]
    if config.strict_requests:
        arguments.append("--strict-requests")
    if config.allow_remote_clients:
        arguments.append("--allow-remote-clients")
    if config.tenants.file is not None:
        arguments += ["--tenants", config.tenants.file]
    arguments += ["--limits", config.tenants.quotas.limits]
    arguments += ["--limits-timeout", str(config.tenants.quotas.call_timeout_s)]
    if config.tenants.quotas.spend_file is not None:
        arguments += ["--spend-file", config.tenants.quotas.spend_file]
    if config.listen_fd is not None:
        arguments += ["--listen-fd", str(config.listen_fd)]
    if config.siblings is not None:
        arguments += ["--siblings", msgspec.json.encode(config.siblings).decode()]
    for role, addresses in (
        ("prefill", config.prefill_addresses),
        ("decode", config.decode_addresses),
    ):
        for address in addresses:
            is_spare = address in config.spare_addresses
            arguments += [f"--spare-{role}" if is_spare else f"--{role}", address]
    return arguments

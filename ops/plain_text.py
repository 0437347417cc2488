"""Text from elsewhere, made safe to show: it moves no cursor and forges no line."""

from __future__ import annotations

import re
from typing import Final

_OPTIONS: Final = {
    "kv_pool_bytes": "--kv-pool",
    "host_cache_bytes": "--host-cache",
    "pinned_bytes": "--pinned-memory",
    "prompt_chunk_tokens": "--prompt-chunk",
    "target_step_s": "--target-step",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "max_batch_tokens": "--embedding-batch",
    "max_wait_s": "--embedding-wait",
    "max_guesses": "--speculate-guesses",
    "max_step_tokens": "--speculate-step-tokens",
    "peer_timeout_s": "--peer-timeout",
    "progress_timeout_s": "--progress-timeout",
    "lease_ttl_s": "--lease-ttl",
    "layer_groups": "--kv-layer-groups",
    "layer_group_min_tokens": "--kv-layer-group-min-tokens",
    "share_memory": "--share-kv-memory",
    "token_window": "--token-window",
    "stall_timeout_s": "--stall-timeout",
    "drain_timeout_s": "--drain-timeout",
    "max_queued_requests": "--max-queued-requests",
    "max_connections": "--max-connections",
    "max_connections_per_address": "--max-connections-per-address",
    "trusted_proxies": "--trusted-proxies",
    "metrics_compat": "--metrics-compat",
    "max_local_tokens": "--max-local-tokens",
    "curve_dir": "--curve",
    "kv-plaintext": "--kv-plaintext",
}
"""Settings by the names of triolet/config*.py, and the options that set them."""
_PLAIN: Final = ("backend", "device", "dtype", "host", "port", "speculate", "threads", "weights")
"""Settings that are called as their options are: at the start of a message, and before a value."""
_SETTING: Final = re.compile(
    rf"(?<![\w/.-])(?:{'|'.join(_OPTIONS)})(?![\w/.-])"
    rf"|(?:^|(?<=: )|(?<=use )|(?<=which )|(?<=with ))(?P<plain>{'|'.join(_PLAIN)})(?= is | ')"
)


def printable(text: str) -> str:
    """Return the text with every control character but line feeds replaced."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def one_line(text: str) -> str:
    """Return the text as a single line without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def as_typed(message: str) -> str:
    """Return a message about settings with the options by which they are set."""

    def option(match: re.Match[str]) -> str:
        plain = match["plain"]
        return _OPTIONS[match[0]] if plain is None else f"--{plain}"

    return _SETTING.sub(option, message)

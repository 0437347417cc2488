"""One limit of two whole servers that share Redis, while that is there, away, and back again.

Two `triolet serve` with the demo model, each with workers of its own; clients ask both for several
times what a tenant may have.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio

from ..campaign.answers import key_headers
from ..campaign.limits import Taken, take_all
from ..harness.servers import running_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..harness.redis import OwnRedis

LIMIT: Final = 1500.0
"""Tokens per minute: a bucket that the clients empty within seconds."""
TENANTS: Final = ("before", "meanwhile", "afterwards")
"""One for each time, so that each begins with all that it may have."""
OPERATOR: Final = "operator"
OPTIONS: Final = ("--no-admission", "--no-brownout", "--no-guard", "--log-level", "info")
"""Only limits refuse anything."""
PATIENCE_S: Final = 60.0
POLL_S: Final = 0.05


def measure(redis: OwnRedis, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each time: what was allowed, what two servers admitted, and the share."""
    with TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        tenants = folder / "tenants.toml"
        tenants.write_text(_file())
        options = [*OPTIONS, "--tenants", str(tenants), "--limits", redis.url]
        urls = [
            running.enter_context(running_server(options, folder / f"server-{n}.log"))
            for n in range(2)
        ]
        _wait(lambda: all(_metric(url, "servers") == 2 for url in urls), "they know each other")
        before = trio.run(take_all, _key_of(TENANTS[0]), urls, seconds)
        rows = [_row(TENANTS[0], urls, [before], LIMIT)]
        redis.stop()
        _wait(lambda: not any(_metric(url, "store_up") for url in urls), "both miss Redis")
        meanwhile = [trio.run(take_all, _key_of(TENANTS[1]), [url], seconds) for url in urls]
        rows += [_row(TENANTS[1], urls, meanwhile, LIMIT / 2)]
        redis.start()
        _wait(lambda: all(_metric(url, "store_up") for url in urls), "both have Redis again")
        afterwards = trio.run(take_all, _key_of(TENANTS[2]), urls, seconds)
        rows += [_row(TENANTS[2], urls, [afterwards], LIMIT)]
    return rows


def _row(phase: str, urls: list[str], taken: list[Taken], limit: float) -> dict[str, Any]:
    return {
        "limits": {"before": "shared", "meanwhile": "local", "afterwards": "shared again"}[phase],
        "limit": LIMIT,
        "allowed": sum(one.allowed(limit)[1] for one in taken),
        "admitted": sum(one.tokens for one in taken),
        "share": max((one.share(limit) for one in taken), key=lambda share: abs(share - 1)),
        "refusals": sum(one.refusals for one in taken),
        "failed_calls": sum(_metric(url, "store_failures_total") for url in urls),
    }


def _key_of(tenant: str) -> str:
    """Return a key: the servers live as long as this process and listen on loopback."""
    return f"key-of-{tenant}-for-this-benchmark-only"


def _file() -> str:
    lines = [f'cache_secret = "{"0" * 64}"', "[plans.limited]", f"tokens_per_minute = {LIMIT}"]
    for name in (*TENANTS, OPERATOR):
        digest = hashlib.sha256(_key_of(name).encode()).hexdigest()
        lines += [f"[tenants.{name}]", f'keys = ["sha256:{digest}"]']
        lines += ['role = "operator"'] if name == OPERATOR else ['plan = "limited"']
    return "\n".join(lines) + "\n"


def _metric(url: str, name: str) -> float:
    headers = key_headers(_key_of(OPERATOR))
    text = httpx2.get(f"{url}/metrics", headers=headers, timeout=PATIENCE_S).raise_for_status().text
    for line in text.splitlines():
        if line.startswith(f"triolet_quota_{name} "):
            return float(line.split()[1])
    raise LookupError(f"triolet_quota_{name} is not in /metrics")


def _wait(is_so: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > give_up:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(POLL_S)

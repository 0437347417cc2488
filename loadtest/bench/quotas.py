"""`python -m loadtest.bench.quotas`: one limit shared by two servers, and the cost of checking it.

First a single process times reservations and settlements in each store. Then two processes share a
redis-server that this program starts on loopback, and demand more than a tenant's limit for some
seconds. The admitted amount is compared with the limit. The same is done with two whole servers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio
from rich.console import Console

from server.tenants.accounts import QuotaAsk, Settlement, TenantLimits
from server.tenants.memory_store import MemoryStore, QuotaObserver, SpendWatch
from server.tenants.redis_store import RedisStore
from triolet.config import QuotaConfig

from ..campaign.answers import key_headers
from ..campaign.limits import Taken, take_all
from ..harness.metrics import total
from ..harness.progress import announce, progress
from ..harness.redis import is_installed, own_redis
from ..harness.report import Ratio, Report, describe, finish, line_of
from ..harness.servers import TAKES_ALL, running_server
from ..harness.statistics import percentile
from ..harness.tenants import key_of, write_tenants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..harness.redis import OwnRedis


LIMIT: Final = 1500.0
"""Tokens per minute: a bucket that the clients empty within seconds."""
TENANTS: Final = ("before", "meanwhile", "afterwards")
"""One tenant for each phase, so that each phase starts with a full bucket."""
OPERATOR: Final = "operator"
PATIENCE_S: Final = 60.0
POLL_S: Final = 0.05


def measure(redis: OwnRedis, seconds: float) -> list[dict[str, Any]]:
    """Return a row for each phase: the allowed and admitted tokens, and their ratio."""
    with TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        limit = f"tokens_per_minute = {LIMIT}"
        tenants = write_tenants(folder, dict.fromkeys(TENANTS, limit), OPERATOR)
        options = ["--log-level", "info", "--tenants", str(tenants), "--limits", redis.url]
        urls = [
            running.enter_context(
                running_server([*TAKES_ALL, *options], folder / f"server-{n}.log")
            )
            for n in range(2)
        ]
        _wait(lambda: all(_metric(url, "servers") == 2 for url in urls), "they share Redis")
        before = trio.run(take_all, key_of(TENANTS[0]), urls, seconds)
        rows = [_row(TENANTS[0], urls, [before], LIMIT)]
        redis.stop()
        _wait(lambda: not any(_metric(url, "store_up") for url in urls), "both have lost Redis")
        meanwhile = [trio.run(take_all, key_of(TENANTS[1]), [url], seconds) for url in urls]
        rows += [_row(TENANTS[1], urls, meanwhile, LIMIT / 2)]
        redis.start()
        _wait(lambda: all(_metric(url, "store_up") for url in urls), "both have Redis again")
        afterwards = trio.run(take_all, key_of(TENANTS[2]), urls, seconds)
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


def _metric(url: str, name: str) -> float:
    headers = key_headers(key_of(OPERATOR))
    text = httpx2.get(f"{url}/metrics", headers=headers, timeout=PATIENCE_S).raise_for_status().text
    return total(text, f"triolet_quota_{name}")


def _wait(is_so: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > give_up:
            raise TimeoutError(f"not within {PATIENCE_S:.0f} s: {what}")
        time.sleep(POLL_S)


MOST_OFF: Final = 0.02
"""Allowed deviation from the limit, as a share."""
PER_MINUTE: Final = 1200.0
ASKERS: Final = 4
PAUSE_S: Final = 0.01
"""Seconds between two requests of each client: together many times the refill rate, and more than a
full bucket."""
ADMITTED: Final = "admitted: "


class Unwatched(SpendWatch):
    """Metrics of quotas that are not recorded."""

    def __init__(self) -> None:
        super().__init__(QuotaObserver())

    def call_failed(self, reason: str) -> None:
        """Print a warning: limits that are decided locally distort the measurement."""
        sys.stderr.write(f"a call failed: {reason}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="duration of the run with two accounts"
    )
    parser.add_argument("--whole", type=float, default=8.0, help="duration with two servers")
    parser.add_argument("--requests", type=int, default=3000, help="timed requests per store")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        admitted = trio.run(_ask_for, options.child, options.seconds)
        sys.stdout.write(f"\n{ADMITTED}{admitted}\n")
        return 0
    announce(__doc__)
    console = Console(highlight=False)
    if not is_installed():
        console.print("error: redis-server is not installed", style="red")
        return 2
    with own_redis() as redis:
        rows = [
            trio.run(_time_store, "memory", "", options.requests),
            trio.run(_time_store, "redis", redis.url, options.requests),
        ]
        for row in rows:
            progress(line_of(row))
        admitted, limit, shares = _two_servers(redis.url, options.seconds)
    progress(f"two servers' accounts admitted {admitted:,} of {limit:,.0f}; next: whole servers")
    with own_redis() as redis:
        whole = measure(redis, options.whole)
    found = {"admitted by two servers' accounts that share Redis / limit": admitted / limit}
    found |= {
        f"admitted by two whole servers, limits {row['limits']} / allowed": row["share"]
        for row in whole
    }
    ratios = {name: Ratio(share, 1 - MOST_OFF, 1 + MOST_OFF) for name, share in found.items()}
    servers = [{"server": n, "admitted": share} for n, share in enumerate(shares)]
    more = {"two servers": servers, "two whole servers": whole}
    report = Report("quotas", describe(1), rows, ratios, {}, more)
    return finish(report, console)


def _two_servers(url: str, seconds: float) -> tuple[int, float, list[int]]:
    """Return the total admitted by two processes, the allowed amount, and the amount of each."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__]
    command += ["--child", url, "--seconds", str(seconds)]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    said = [child.communicate()[0].decode() for child in children]
    shares = [int(text.rpartition(ADMITTED)[2]) for text in said]
    # The bucket is full at the start and refills during the run.
    return sum(shares), PER_MINUTE + seconds * PER_MINUTE / 60, shares


async def _ask_for(url: str, seconds: float) -> int:
    """Reserve as one of several servers for `seconds`; return the number of reservations."""
    store = RedisStore(QuotaConfig(limits=url), Unwatched(), f"{time.time_ns()}")
    limits, ids, admitted = TenantLimits(tokens=PER_MINUTE), count(), 0

    async def ask() -> None:
        nonlocal admitted
        while True:
            ask_id = f"{next(ids)}"
            verdict = await store.reserve(QuotaAsk(ask_id, "t", 1), limits)
            if verdict.refused_by is None:
                admitted += 1
                store.settle(Settlement(ask_id, "t", limits, 1, 0))
            await trio.sleep(PAUSE_S)

    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as asking:
                for _ in range(ASKERS):
                    asking.start_soon(ask)
        nursery.cancel_scope.cancel()
    return admitted


async def _time_store(name: str, url: str, requests: int) -> dict[str, Any]:
    """Return the durations of consecutive reservations, with settlements in between."""
    store: MemoryStore | RedisStore = MemoryStore(QuotaConfig(), Unwatched())
    if url:
        store = RedisStore(QuotaConfig(limits=url), Unwatched(), "timed")
    limits = TenantLimits(1e9, 1e12, 10**6, 10**15)
    times = []
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        for number in range(requests):
            began_at = time.perf_counter()
            await store.reserve(QuotaAsk(f"{number}", "u", 100, 10), limits)
            times.append((time.perf_counter() - began_at) * 1e6)
            store.settle(Settlement(f"{number}", "u", limits, 50, 5))
        nursery.cancel_scope.cancel()
    p50, p99 = (percentile(times, percent) for percent in (50, 99))
    return {"store": name, "requests": requests, "p50_us": p50, "p99_us": p99}


if __name__ == "__main__":
    sys.exit(main())

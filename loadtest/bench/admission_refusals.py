"""How soon a real server says no: from a request's first byte to the last one of its refusal.

Processes, sockets and HTTP: a server, and workers whose devices only take time. One tenant keeps
asking for more than the fleet can do; beside it others are refused because there is too much (503),
and one that has used up its minute because of that (429). The clients share the machine with what
they time. Knows no server from within.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import trio

from ..overload.http_client import Asker, BrokenAnswerError, request_bytes
from ..overload.real_fleet import RealShape, real_fleet

OVERLOADED, LIMITED = 503, 429
FLOOD: Final = "flood"
TENANTS: Final = {OVERLOADED: "late", LIMITED: "limited"}
"""Who is refused, and with which status."""
PLANS: Final = {
    FLOOD: "",
    TENANTS[OVERLOADED]: 'classes = ["sheddable"]',
    TENANTS[LIMITED]: "requests_per_minute = 1",
}
FLOODERS: Final = 64
"""Clients of the tenant that asks for too much: twice as many as the fleet has rows."""
WARM_S: Final = 8.0
"""Until the server knows how fast its fleet is, and its queue is as long as it lets it get."""
GAP_S: Final = 0.01
"""Between two requests that are timed: together with the flood a hundred and more a second, where
the fleet can do seven."""
LATE_S: Final = 30.0
"""For an answer. What is not refused has to end by itself."""
FIRST_ID, LAST_ID = 256, 1000
PROMPT_TOKENS, MAX_TOKENS = 100, 20


def key_of(tenant: str) -> str:
    """Return a tenant's key: the fleet lives as long as this process and listens on loopback."""
    return f"key-of-{tenant}-for-this-benchmark-only"


def tenants_file() -> str:
    """Return the file of all tenants."""
    lines = [f'cache_secret = "{"0" * 64}"']
    for name, limits in PLANS.items():
        digest = hashlib.sha256(key_of(name).encode()).hexdigest()
        lines += [f"[plans.{name}]", limits]
        lines += [f"[tenants.{name}]", f'plan = "{name}"', f'keys = ["sha256:{digest}"]']
    return "\n".join(lines) + "\n"


async def time_refusals(requests: int) -> dict[int, list[float]]:
    """Run a fleet and return how many nanoseconds its refusals take, by status. See
    `ask_too_much`."""
    with TemporaryDirectory(prefix="admission-") as folder:
        tenants = Path(folder) / "tenants.toml"
        tenants.write_text(tenants_file(), encoding="utf-8")
        tenants.chmod(0o600)
        shape = RealShape(server_options=("--set", f"server.tenants.file={tenants}"))
        async with real_fleet(shape, Path(folder) / "logs") as fleet:
            return await ask_too_much(fleet.port, requests, WARM_S)


async def ask_too_much(port: int, requests: int, warm_s: float) -> dict[int, list[float]]:
    """Ask a server for more than it can do, and return how many nanoseconds its refusals take.

    Args:
      port: on loopback.
      requests: of each kind; what is taken after all is not counted.
      warm_s: for which there is too much before anything is timed.

    Returns:
      By status.
    """
    taken_ns: dict[int, list[float]] = {status: [] for status in TENANTS}
    flooder, asker = Asker(port), Asker(port)
    async with trio.open_nursery() as flood:
        for request in _bodies(port, FLOOD, FLOODERS):
            flood.start_soon(_keep_asking, flooder, request)
        await trio.sleep(warm_s)
        bodies = {status: _bodies(port, name, requests) for status, name in TENANTS.items()}
        async with trio.open_nursery() as asking:
            for number in range(requests):
                for status, requests_of in bodies.items():
                    asking.start_soon(_time, asker, requests_of[number], taken_ns[status], status)
                    await trio.sleep(GAP_S)
        flood.cancel_scope.cancel()
    for one in (flooder, asker):
        await one.close()
    return taken_ns


async def _time(asker: Asker, request: bytes, into: list[float], status: int) -> None:
    began_at = trio.current_time()
    with trio.move_on_after(LATE_S), suppress(BrokenAnswerError):
        answer = await asker.ask(request)
        if answer.status == status:
            into.append((trio.current_time() - began_at) * 1e9)


async def _keep_asking(asker: Asker, request: bytes) -> None:
    """Ask again as soon as an answer is there, or when a refusal says so."""
    while True:
        answer = await asker.ask(request)
        await trio.sleep(answer.retry_after_s or 0.0)


def _bodies(port: int, tenant: str, count: int) -> list[bytes]:
    numbers = random.Random(tenant)
    headers = {"authorization": f"Bearer {key_of(tenant)}"}
    return [
        request_bytes(
            port,
            {
                "model": "demo",
                "prompt": numbers.choices(range(FIRST_ID, LAST_ID), k=PROMPT_TOKENS),
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "ignore_eos": True,
            },
            headers,
        )
        for _ in range(count)
    ]

"""Rollouts whose store goes away: two servers whose control keeps rollouts in Redis, and a fleet
whose control has a journal.

Measures when servers are back on the stable version, and how long two servers serve different
routes.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from ..harness.control import admin_of
from ..harness.redis import own_redis
from ..harness.servers import ServerProcess, running
from ..harness.streams import COMPLETIONS, Clients, Stream, post
from ..overload.real import ENVIRONMENT
from .candidates import FIRST, GOOD, MODEL
from .device import BROKEN_JOURNAL, COMMAND, FAULTS
from .traffic import WORDS, version_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ..harness.control import Admin
    from ..harness.redis import OwnRedis
    from .fleet import BenchFleet
    from .traffic import Users

NAMES: Final = {MODEL: FIRST, GOOD: GOOD}
"""Tags of the two servers' models by name."""
CONTROL: Final = "ipc:0"
"""A control that does not listen on a port has the number 0."""
STEP_S: Final = 8.0
"""Time of traffic before and after each change of the route."""
SAMPLE_S: Final = 0.05
HELD: Final = {"shares": (0.5, 1.0), "bake_s": 2.0, "min_requests": 10**6, "golden": False}
"""A plan whose first step only ends by an order."""
PATIENCE_S: Final = 60.0
GAP_S: Final = 3.0
"""Different answers further apart than this belong to two changes of the route."""
BACK_S: Final = 15.0
"""Time in which servers must be on the stable version once Redis is gone."""


class Pair(NamedTuple):
    """What both servers answered to one user.

    Attributes:
      at: Unix time.
      versions: versions of the answers.
    """

    at: float
    versions: tuple[str, str]


def apart_s(pairs: Sequence[Pair]) -> float:
    """Return the longest time in which users got different versions from the two servers."""
    spans = [[0.0, -GAP_S]]
    for at, (one, other) in pairs:
        if one != other and at - spans[-1][1] >= GAP_S:
            spans.append([at, at])
        elif one != other:
            spans[-1][1] = at
    return max((last - first + SAMPLE_S for first, last in spans[1:]), default=0.0)


@contextmanager
def two_servers(folder: Path, digests: dict[str, str], redis: str) -> Iterator[list[str]]:
    """Run two servers, a decode worker for each version, and control; yield the servers' URLs.

    Args:
      folder: folder with the models.
      digests: digests of both versions by tag.
      redis: URL of the Redis.
    """
    links = folder / "links"
    links.mkdir(mode=0o700, exist_ok=True)  # sockets need a private folder
    settings, control = folder / "hosts.toml", f"ipc://{links}/control"
    models = "".join(
        f'[[server.models]]\nname = "{name}"\nmodel_dir = "{folder / tag}"\n'
        f'digest = "{digests[tag]}"\ndecode_addresses = ["ipc://{links}/{tag}.worker"]\n'
        for name, tag in NAMES.items()
    )
    settings.write_text(
        f'[server]\ncontrol_addresses = ["{control}"]\n'
        f'[server.routing]\nlocal_prefill = "always"\n{models}'
        f'[decode.engine]\nkv_pool_bytes = "32MiB"\n'
        f'[control]\naddress = "{control}"\nstate_dir = "{folder}/state"\n'
        f'[control.redis]\nurl = "{redis}"\n'
    )
    environment = os.environ | ENVIRONMENT | {FAULTS: str(folder / "faults")}
    config = ("--config", str(settings))
    with ExitStack() as stack, (folder / "hosts.log").open("wb") as log:
        for words in (["control"], *(_worker(folder, tag) for tag in NAMES.values())):
            command = [*COMMAND, *words, *config]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(process.wait)
            stack.callback(process.kill)
        command, port = [*COMMAND, "server", *config], ("--set", "server.port={}")
        logs = [folder / "server-0.log", folder / "server-1.log"]
        servers = [ServerProcess(command, path, environment, port_words=port) for path in logs]
        yield [stack.enter_context(running(one)).url for one in servers]


def _worker(folder: Path, tag: str) -> list[str]:
    """Return the words of the command that runs the decode worker of a version."""
    links = {"control": f"{tag}.worker", "kv": f"{tag}.kv"}
    addresses = [
        f"--set=decode.{link}_address=ipc://{folder}/links/{at}" for link, at in links.items()
    ]
    return ["decode", str(folder / tag), f"--set=decode.name={tag}", *addresses]


def measure_hosts(folder: Path, digests: dict[str, str]) -> dict[str, Any]:
    """Return a row with the figures of two servers.

    Args:
      folder: folder with the models.
      digests: digests of both versions by tag.
    """
    with own_redis() as redis, two_servers(folder, digests, redis.url) as urls:
        return trio.run(_measure, urls, redis)


async def _measure(urls: Sequence[str], redis: OwnRedis) -> dict[str, Any]:
    """Roll out, roll back, roll out again and lose Redis."""
    pairs: list[Pair] = []
    async with admin_of(CONTROL) as admin, trio.open_nursery() as nursery:
        nursery.start_soon(_sample, urls, pairs)
        for orders in (("promote", "rollback"), ("promote",)):
            await _begin_step(admin, GOOD)
            for order in orders:
                await trio.sleep(STEP_S)
                await admin.order(f"/admin/rollouts/{MODEL}/{order}")
            await trio.sleep(STEP_S)
        together, gone_at = len(pairs), time.time()
        await trio.to_thread.run_sync(redis.stop)
        await trio.sleep(BACK_S)
        nursery.cancel_scope.cancel()
    stable = pairs[0].versions[0]
    served = [one.at for one in pairs if {*one.versions} != {stable}]
    return _row("Redis, two servers", served, gone_at) | {"apart s": apart_s(pairs[:together])}


async def measure_journal(
    fleet: BenchFleet, admin: Admin, users: Users, candidate: str
) -> dict[str, Any]:
    """Return a row with the figures of a fleet whose control cannot write its journal any more.

    Args:
      fleet: the fleet, without a rollout.
      admin: its control.
      users: its users, who send requests meanwhile.
      candidate: digest of the version without faults.
    """
    began_at = time.time()
    await _begin_step(admin, f"{MODEL}:{GOOD}")
    await trio.sleep(STEP_S)
    broken, gone_at = fleet.folder / "faults" / BROKEN_JOURNAL, time.time()
    broken.touch()
    await trio.sleep(BACK_S)
    broken.unlink()
    served = [one.sent_at for one in users.since(began_at) if one.version == candidate]
    await admin.order(f"/admin/rollouts/{MODEL}/rollback")
    await admin.until(MODEL, lambda shown: shown["is_over"], PATIENCE_S)
    return _row("SQLite, one server", served, gone_at) | {"apart s": None}


def _row(store: str, served: Sequence[float], gone_at: float) -> dict[str, Any]:
    """Return a row of the table.

    Args:
      store: the store and its servers.
      served: when requests to the candidate were sent.
      gone_at: when the store went away.
    """
    stable_s = max(0.0, max(served, default=0.0) - gone_at)
    return {"store": store, "to the candidate": len(served), "stable after s": stable_s}


async def _begin_step(admin: Admin, ref: str) -> None:
    """Start a rollout, and wait until it stays in its first step."""
    await admin.order("/admin/rollouts", model=MODEL, ref=ref, **HELD)
    await admin.until(MODEL, lambda shown: shown["step"] == 1, PATIENCE_S)


async def _sample(urls: Sequence[str], pairs: list[Pair]) -> None:
    """Ask both servers at the same time, for one user after the other."""
    async with Clients(urls[0]).reading() as one, Clients(urls[1]).reading() as other:
        for number in count():
            fields = {"model": MODEL, "prompt": [WORDS[number % len(WORDS)]], "max_tokens": 1}
            request = post(COMPLETIONS, fields | {"user": f"user-{number}"})
            at, answers = time.time(), (Stream(), Stream())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.ask, request, answers[0])
                nursery.start_soon(other.ask, request, answers[1])
            pairs.append(Pair(at, (version_of(answers[0]), version_of(answers[1]))))
            await trio.sleep(SAMPLE_S)

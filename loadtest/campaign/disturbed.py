"""Load with faults in it: the requests go on while one process after the other is broken.

When a fault comes is drawn from a seed; that it came, and that the fleet is whole again before the
next one, is seen to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from .asks import key_headers
from .client import ask_all
from .exchange import ConnectionBrokenError, get
from .injectors import inject
from .processes import HasNotHappenedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from .asks import Ask
    from .client import Story
    from .injectors import Injected
    from .processes import FleetLog

FIRST_MOMENT, LAST_MOMENT = 0.05, 0.85
"""Faults come while this share of the requests has been answered: early enough that the rest runs
on what the fault left behind."""
MAX_JITTER_S = 0.5
"""After the answer that a fault waits for, so that it does not always meet the same moment."""
WHOLE_TIMEOUT_S = 120.0
POLL_S = 0.1


@dataclass(slots=True)
class Disturbed:
    """A run.

    Attributes:
      stories: of all requests.
      injected: the faults that happened, in order.
      elapsed_s: of the load.
    """

    stories: list[Story] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    elapsed_s: float = 0.0


async def ask_under_faults(
    url: str,
    log: FleetLog,
    asks: Sequence[Ask],
    clients: int,
    faults: Sequence[str],
    rng: Random,
    *,
    retries_broken: bool,
    last_moment: float = LAST_MOMENT,
    max_jitter_s: float = MAX_JITTER_S,
    key: str = "",
) -> Disturbed:
    """Ask everything, and do these faults at random moments meanwhile, one after the other.

    Args:
      url: of the server.
      log: of its fleet.
      asks: the requests.
      clients: how many ask side by side.
      faults: names of INJECTORS.
      rng: decides moments and victims.
      retries_broken: whether a broken connection is tried again; else it is a failure.
      last_moment: the share of answers after which no fault begins.
      max_jitter_s: between that answer and the fault.
      key: of an operator, where there are tenants.

    Raises:
      HasNotHappenedError: a fault did not show, or the fleet did not get whole again.
    """
    run = Disturbed()
    num_ended = 0
    somebody_ended = trio.Event()

    def on_end(_: Story) -> None:
        nonlocal num_ended, somebody_ended
        num_ended += 1
        somebody_ended.set()
        somebody_ended = trio.Event()

    async def disturb() -> None:
        moments = sorted(rng.uniform(FIRST_MOMENT, last_moment) for _ in faults)
        for moment, fault in zip(moments, faults, strict=True):
            while num_ended < moment * len(asks):
                await somebody_ended.wait()
            await trio.sleep(rng.uniform(0, max_jitter_s))
            if num_ended < len(asks):
                run.injected.append(await inject(log, fault, rng))
                await wait_whole(url, log, key)

    began_at = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(disturb)
        run.stories = await ask_all(url, asks, clients, on_end, retries_broken=retries_broken)
        run.elapsed_s = trio.current_time() - began_at
    return run


async def wait_whole(url: str, log: FleetLog, key: str = "") -> None:
    """Wait until the server knows every worker that was ever started.

    Args:
      url: of the server.
      log: of its fleet.
      key: of an operator, where there are tenants.

    Raises:
      HasNotHappenedError: it does not.
    """
    wanted = set(log.names("prefill") + log.names("decode"))
    present: set[str] = set()
    with trio.move_on_after(WHOLE_TIMEOUT_S):
        while not wanted <= present:
            await trio.sleep(POLL_S)
            present = await _workers_up(url, key)
        return
    raise HasNotHappenedError(f"workers that did not come back: {sorted(wanted - present)}")


async def _workers_up(url: str, key: str) -> set[str]:
    try:
        _, body = await get(url, "/metrics", key_headers(key))
    except ConnectionBrokenError:
        return set()
    lines = [line for line in body.decode().splitlines() if line.startswith("triolet_worker_up{")]
    return {line.split('worker="')[1].split('"')[0] for line in lines if line.endswith(" 1.0")}

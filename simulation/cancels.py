"""`python -m simulation.cancels`: simulate 100,000 clients that disconnect, or whose deadlines
pass, at random moments.

Each process runs one fleet for its whole share, so that leaks add up. Exit code 0 if every block
was freed, no token was computed for a disconnected client (except in the running step), and memory
did not grow.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import random
import resource
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import trio
from rich.console import Console
from rich.table import Table

from triolet.config import LinkConfig
from triolet.ids import Role
from triolet.sampling import SamplingParams
from triolet.units import MIB, MILLISECONDS, SECONDS

from .campaign import MAX_SHOWN, keep_quiet
from .checker import Checker
from .client import Client, Wish
from .deterministic import run
from .engine import VOCAB_SIZE, SimulatedCost
from .faults import CALM, Tally
from .trace import Trace
from .world import Sizes, World

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from triolet.ids import AttemptKey

SIZES: Final = Sizes(
    num_servers=1,
    num_blocks=64,
    max_num_seqs=6,
    costs={
        Role.PREFILL: SimulatedCost(10 * MILLISECONDS, 2 * MILLISECONDS),
        Role.DECODE: SimulatedCost(40 * MILLISECONDS, 2 * MILLISECONDS),
    },
    sweep_s=LinkConfig().sweep_interval_s,
)
INSTRUCTIONS: Final = tuple(range(900, 909))
"""Half of the prompts start with these tokens."""
CLIENTS_PER_S: Final = 25.0
"""About the fleet's capacity, so that some clients leave while they wait."""
LONGEST_STAY_S: Final = 1.5 * SECONDS
LOOK_S: Final = 1 * SECONDS
REST_S: Final = 5 * SECONDS
SHARES: Final = (0.2, 0.6, 1.0)
"""Shares of the run at which memory is measured."""
MAX_GROWTH: Final = 0.03
"""Allowed growth of memory from the first to the last measurement, for the allocator."""
PAGE_BYTES: Final = resource.getpagesize()


@dataclass(slots=True)
class Cancels:
    """Results of one process.

    Attributes:
      phases: phases of requests when their clients left.
      free_s: seconds from each cancel until its last block was free.
      rss_bytes: memory at each of SHARES.
      violations: descriptions of violations.
      virtual_s: simulated seconds.
      trace: hash of everything that happened.
    """

    phases: Counter[str] = field(default_factory=Counter)
    free_s: array[float] = field(default_factory=lambda: array("d"))
    rss_bytes: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    virtual_s: float = 0.0
    trace: str = ""

    @property
    def growth(self) -> float:
        """Relative growth of memory."""
        return self.rss_bytes[-1] / self.rss_bytes[0] - 1 if self.rss_bytes else 0.0


class Leavers:
    """Clients that cancel their requests.

    Args:
      seed: random seed.
      count: number of cancels of running requests.
    """

    def __init__(self, seed: int, count: int) -> None:
        self.result = Cancels()
        self._count = count
        self._rng = random.Random(f"leavers {seed}")
        self._trace = Trace()
        self._world = World(seed, SIZES, self._trace, Tally())
        self._freed_at: dict[bytes, float] = {}

    async def run(self) -> None:
        """Run all clients, and check for leaks."""
        world, result = self._world, self.result
        checker = Checker(world, CALM.max_delay_s)
        began_at = trio.current_time()
        async with trio.open_nursery() as nursery:
            for process in world.processes:
                nursery.start_soon(process.keep)
            await trio.sleep(REST_S)
            for worker in world.workers:
                assert worker.engine is not None, "no process dies here"
                worker.engine.ledger.on_freed = self._note_freed
            nursery.start_soon(self._look, checker)
            async with trio.open_nursery() as clients:
                number = 0
                while result.phases.total() < self._count:
                    await trio.sleep(self._rng.expovariate(CLIENTS_PER_S))
                    clients.start_soon(self._client, number)
                    number += 1
                    self._measure()
            self._measure()
            await trio.sleep(REST_S)
            checker.look()
            checker.look_at_end()
            self._trace.finish()
            await checker.audit()
            nursery.cancel_scope.cancel()
        result.virtual_s = trio.current_time() - began_at
        result.violations += world.violations
        result.trace = self._trace.hexdigest()

    async def _client(self, number: int) -> None:
        rng = self._rng
        prompt_ids = (
            *rng.choice(((), INSTRUCTIONS)),
            1 + number % (VOCAB_SIZE - 1),
            *(rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(2, 24 - len(INSTRUCTIONS)))),
        )
        wish = Wish(
            number,
            prompt_ids,
            SamplingParams(max_tokens=rng.randint(8, 32), seed=number, ignore_eos=True),
            leaves_after_s=rng.uniform(0.0, LONGEST_STAY_S),
            has_deadline=number % 2 == 1,
        )
        client = Client(wish, partial(rng.randbytes, 16), self._world.report)
        await self._world.servers[0].serve(client.run)
        await client.is_over.wait()
        if client.left_at is not None:
            how = " at its deadline" if client.wish.has_deadline else ""
            self.result.phases[client.left_in + how] += 1
        await trio.sleep(LOOK_S)  # by then all late messages have arrived
        self._see_off(client)

    def _see_off(self, client: Client) -> None:
        """Check the result of a client, and drop it."""
        freed_at = self._freed_at.pop(client.request_id, 0.0)
        left_at = client.left_at
        if left_at is not None:
            self.result.free_s.append(max(0.0, freed_at - left_at))
        # A deadline takes effect at the next check.
        told_after_s = CALM.max_delay_s + SIZES.sweep_s * client.wish.has_deadline
        for worker in self._world.workers:
            assert worker.engine is not None, "no process dies here"
            sampled_at = worker.engine.sampled_at.pop(client.wish.chosen_by, 0.0)
            if left_at is not None and sampled_at - left_at > told_after_s:
                late_s = sampled_at - left_at
                self._world.report(f"{worker} began a step {late_s:.3f} s after {client} left")

    async def _look(self, checker: Checker) -> None:
        while True:
            await trio.sleep(LOOK_S)
            checker.look()

    def _note_freed(self, owner: Hashable) -> None:
        key = cast("AttemptKey", owner)
        self._freed_at[key.request_id] = trio.current_time()

    def _measure(self) -> None:
        measured = self.result.rss_bytes
        if len(measured) == len(SHARES):
            return
        if self.result.phases.total() >= SHARES[len(measured)] * self._count:
            gc.collect()
            resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
            measured.append(resident * PAGE_BYTES)


def leave(seed: int, count: int) -> Cancels:
    """Run one process's share."""
    leavers = Leavers(seed, count)
    run(leavers.run, seed)
    return leavers.result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all shares; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m simulation.cancels")
    parser.add_argument("--count", type=int, default=100_000, help="cancels (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    share = -(-options.count // options.processes)
    began_at = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes, initializer=keep_quiet) as pool:
        shares = pool.starmap(leave, [(seed, share) for seed in range(options.processes)])
    return 0 if show(shares, time.monotonic() - began_at, console) else 1


def show(shares: Sequence[Cancels], elapsed_s: float, console: Console) -> bool:
    """Print the results; return whether they are good."""
    phases: Counter[str] = sum((result.phases for result in shares), Counter())
    table = Table("phase", "cancels")
    table.columns[1].justify = "right"
    for phase, number in phases.most_common():
        table.add_row(phase, f"{number}")
    console.print(table)
    free_s = sorted(seconds for result in shares for seconds in result.free_s)
    at = {share: free_s[min(len(free_s) - 1, int(share * len(free_s)))] for share in (0.5, 0.99)}
    console.print(
        f"{phases.total()} cancels in {elapsed_s:.0f} s "
        f"({sum(result.virtual_s for result in shares):.0f} virtual seconds)"
    )
    console.print(
        f"until all blocks were free, virtual: p50 {1000 * at[0.5]:.0f} ms, "
        f"p99 {1000 * at[0.99]:.0f} ms, at most {1000 * free_s[-1]:.0f} ms"
    )
    for number, result in enumerate(shares):
        measured = ", ".join(f"{size / MIB:.1f} MiB" for size in result.rss_bytes)
        console.print(
            f"process {number}: memory at 20 %, 60 %, 100 %: {measured}; trace {result.trace}"
        )
        for violation in result.violations[:MAX_SHOWN]:
            console.print(f"  VIOLATION {violation}", markup=False)
    is_flat = all(result.growth <= MAX_GROWTH for result in shares)
    if not is_flat:
        console.print(f"VIOLATION memory grew by more than {MAX_GROWTH:.0%}")
    return is_flat and not any(result.violations for result in shares)


if __name__ == "__main__":
    sys.exit(main())

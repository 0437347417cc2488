"""A batch while every process of its fleet is killed once: what came of each line.

Deaths are spread over the batch's progress, so that each strikes a batch that is under way. Knows
the campaign's parts; prints nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

import trio

from .batch_client import BatchClient, draw_lines, has_ended, num_done
from .disturbed import wait_whole
from .injectors import kill
from .leftovers import blocks_when_settled, violations_now
from .own_fleet import SUPERVISOR, own_fleet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .injectors import Injected
    from .own_fleet import OwnFleet

REFERENCES: Final = 20
"""Lines that are asked once more, directly, of the fleet at rest: the answers must be the same."""
LINE_PREFIX: Final = "batch_req_"


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was killed.

    Attributes:
      fault: what was done, with its proof.
      num_done: lines that had their result then.
      back_s: from the signal to the next life being ready.
    """

    fault: Injected
    num_done: int
    back_s: float


@dataclass(slots=True)
class BatchVerdict:
    """What came of a batch.

    Attributes:
      num_servers: that shared the port.
      num_lines: it had.
      deaths: in their order.
      elapsed_s: from creation to end.
      num_computed: answers that the server's log tells of; above `num_lines` where deaths came
        between an answer and its transaction.
      wrongs: what should not be, in words.
    """

    num_servers: int
    num_lines: int
    deaths: list[Death] = field(default_factory=list)
    elapsed_s: float = 0.0
    num_computed: int = 0
    wrongs: list[str] = field(default_factory=list)


async def run_batch(
    num_lines: int,
    max_tokens: int,
    num_servers: int,
    seed: int,
    out: Path,
    options: Sequence[str],
) -> BatchVerdict:
    """Start a fleet, run a batch, kill every process of it once, and look at every line.

    Args:
      num_lines: of the batch.
      max_tokens: of an answer; half of that at least.
      num_servers: that share the port and the database.
      seed: of lines and of the order of deaths.
      out: where the database and the log go.
      options: more of `triolet serve`.

    Raises:
      ServerDidNotStartError: with the end of its log.
      HasNotHappenedError: a fault did not show, or a process did not come back.
      BatchTookTooLongError: the batch stopped.
    """
    verdict = BatchVerdict(num_servers, num_lines)
    lines = draw_lines(num_lines, seed, max_tokens)
    serve = [
        *("--batch-dir", str(out / f"jobs-{num_servers}"), "--servers", str(num_servers)),
        *("--log-level", "info", *options),
    ]
    with own_fleet(serve, out / f"batch-{num_servers}.log") as fleet:
        await wait_whole(fleet.url, fleet.log)
        async with BatchClient(fleet.url) as client:
            began_at = trio.current_time()
            batch_id = await client.create(lines)
            await _kill_everything(client, fleet, batch_id, Random(seed), verdict)
            batch = await client.wait(batch_id, has_ended)
            verdict.elapsed_s = trio.current_time() - began_at
            good = await client.results(batch["output_file_id"])
            bad = await client.results(batch["error_file_id"])
            verdict.wrongs += wrongs_of(lines, batch, good, bad)
            await _compare(client, lines, good, Random(seed), verdict)
        leased = (await blocks_when_settled(fleet.url)).leased
        if leased:
            verdict.wrongs.append(f"{leased} blocks are leased and nothing runs")
        verdict.wrongs += await violations_now(fleet.url)
        verdict.num_computed = sum(
            str(entry["client_request_id"]).startswith(LINE_PREFIX)
            for outcome in ("stop", "length")
            for entry in fleet.log.of("request_ended", outcome=outcome)
        )
    return verdict


async def _kill_everything(
    client: BatchClient, fleet: OwnFleet, batch_id: str, rng: Random, verdict: BatchVerdict
) -> None:
    names = sorted(fleet.log.pids())
    last = [name for name in names if name.startswith("prefill-")]
    victims = [*(name for name in names if name not in last), SUPERVISOR]
    rng.shuffle(victims)
    # Without prefill the batch goes on, by decode alone: it might end before the next death.
    victims += last
    for number, victim in enumerate(victims, 1):
        due = verdict.num_lines * number // (len(victims) + 1)
        batch = await client.wait(batch_id, partial(_is_at, due))
        if has_ended(batch):
            verdict.wrongs.append(f"the batch had ended before {victim} was killed")
            return
        began_at = trio.current_time()
        if victim == SUPERVISOR:
            fault = await fleet.kill_supervisor()
        else:
            fault = await kill(fleet.log, victim, f"{victim}-kill")
        back_s = trio.current_time() - began_at
        verdict.deaths.append(Death(fault, num_done(batch), back_s))


def _is_at(due: int, batch: dict[str, Any]) -> bool:
    return has_ended(batch) or num_done(batch) >= due


async def _compare(
    client: BatchClient,
    lines: Sequence[dict[str, Any]],
    good: Sequence[Mapping[str, Any]],
    rng: Random,
    verdict: BatchVerdict,
) -> None:
    answers = {result["custom_id"]: result["response"]["body"] for result in good}
    for line in rng.sample(lines, min(REFERENCES, len(lines))):
        answer = answers.get(line["custom_id"])
        if answer is not None and said(answer) != said(await client.ask(line["body"])):
            verdict.wrongs.append(f"{line['custom_id']} has another answer than asked directly")


def said(answer: Mapping[str, Any]) -> object:
    """Return what an answer says, without what is its own each time it is asked."""
    usage = answer["usage"]
    return answer["choices"], usage["prompt_tokens"], usage["completion_tokens"]


def wrongs_of(
    lines: Sequence[Mapping[str, Any]],
    batch: Mapping[str, Any],
    good: Sequence[Mapping[str, Any]],
    bad: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return what is wrong with a batch that has ended; nothing if every line is answered once.

    Args:
      lines: that were asked for.
      batch: as the server shows it.
      good: lines of its output.
      bad: lines of its errors.
    """
    wrongs = []
    if batch["status"] != "completed":
        wrongs.append(f"the batch is {batch['status']}")
    expected = {"total": len(lines), "completed": len(lines), "failed": 0}
    if batch["request_counts"] != expected:
        wrongs.append(f"the batch counts {batch['request_counts']}")
    times = Counter(result["custom_id"] for result in (*good, *bad))
    asked = {line["custom_id"] for line in lines}
    wrongs += [f"{name} has no result" for name in sorted(asked - times.keys())]
    wrongs += [f"{name} was never asked" for name in sorted(times.keys() - asked)]
    wrongs += [f"{name} has {count} results" for name, count in times.items() if count > 1]
    wrongs += [f"{result['custom_id']} failed: {result}" for result in bad]
    wrongs += [
        f"{result['custom_id']} has status {result['response']['status_code']}"
        for result in good
        if result["response"]["status_code"] != 200
    ]
    return wrongs

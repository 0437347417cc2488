"""Run a batch of the API and kill every process of its fleet while it progresses."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio

from ..harness.prompts import PromptMix
from ..harness.servers import (
    TRIOLET,
    HasNotHappenedError,
    ServerProcess,
    is_gone,
    running,
    wait_until,
)
from .faults import PROOF_TIMEOUT_S, Injected, blocks_when_settled, kill, violations_now, wait_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


CHAT: Final = "/v1/chat/completions"
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.05
WAIT_S: Final = 900.0
"""Seconds to wait for a batch's end, on a busy machine."""


def draw_lines(count: int, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return requests of various lengths with deterministic answers."""
    rng, mix = Random(seed), PromptMix(seed)
    lines = []
    for number in range(count):
        prompt = mix.draw()
        body = {
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": rng.randint(max_tokens // 2, max_tokens),
            "temperature": rng.choice((0.0, 0.8)),
            "seed": prompt.seed,
            "ignore_eos": True,
        }
        custom_id = f"line-{number:05d}"
        lines.append({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})
    return lines


class BatchClient:
    """Client of the batch API of one server; an async context manager.

    Args:
      url: address of the server.
    """

    def __init__(self, url: str) -> None:
        self._client = httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S)

    async def __aenter__(self) -> BatchClient:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def create(self, lines: Sequence[dict[str, Any]]) -> str:
        """Upload a file and create a batch of it; return the batch's id."""
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        answer = await self._client.post(
            "/v1/files",
            files={"file": ("input.jsonl", content)},
            data={"purpose": "batch"},
        )
        answer.raise_for_status()
        fields = {
            "input_file_id": answer.json()["id"],
            "endpoint": lines[0]["url"],
            "completion_window": "24h",
        }
        answer = await self._client.post("/v1/batches", json=fields)
        answer.raise_for_status()
        return str(answer.json()["id"])

    async def look(self, batch_id: str) -> dict[str, Any] | None:
        """Return a batch, or None if no server answers."""
        try:
            answer = await self._client.get(f"/v1/batches/{batch_id}")
        except httpx2.TransportError:
            return None
        if answer.status_code >= 500:
            return None
        answer.raise_for_status()
        batch: dict[str, Any] = answer.json()
        return batch

    async def wait(self, batch_id: str, is_far_enough: Callable[[dict[str, Any]], bool]) -> Any:  # noqa: ANN401
        """Poll a batch until it is far enough, also while servers are down; return it.

        Raises:
          HasNotHappenedError: it did not get that far in time.
        """
        batch = None
        with trio.move_on_after(WAIT_S):
            while True:
                batch = await self.look(batch_id)
                if batch is not None and is_far_enough(batch):
                    return batch
                await trio.sleep(POLL_S)
        raise HasNotHappenedError(f"after {WAIT_S:.0f} s the batch is {batch}")

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a result file."""
        if file_id is None:
            return []
        answer = await self._client.get(f"/v1/files/{file_id}/content")
        answer.raise_for_status()
        return [json.loads(line) for line in answer.text.splitlines()]

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Send a line's request directly and return the answer."""
        answer = await self._client.post(CHAT, json=body)
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        return document


def has_ended(batch: dict[str, Any]) -> bool:
    """Return whether a batch is in a final state."""
    return batch["status"] in ENDED


def num_done(batch: dict[str, Any]) -> int:
    """Return the number of lines with a result."""
    counts = batch["request_counts"]
    return int(counts["completed"]) + int(counts["failed"])


SUPERVISOR = "supervisor"


async def kill_supervisor(fleet: ServerProcess) -> Injected:
    """SIGKILL the supervisor, wait until all its children have exited, and start a new one."""
    pids, pid = fleet.log.pids(), fleet.pid
    at, epoch_s = trio.current_time(), time.time()
    fleet.kill()
    await wait_until(
        lambda: all(map(is_gone, pids.values())),
        PROOF_TIMEOUT_S,
        f"the children {pids} of the killed supervisor are gone",
    )
    proof = f"pid {pid} gone, its {len(pids)} children {trio.current_time() - at:.2f} s later"
    fleet.start()
    await trio.to_thread.run_sync(fleet.wait_ready)
    return Injected(f"{SUPERVISOR}-kill", SUPERVISOR, pid, at, epoch_s, proof)


REFERENCES: Final = 20
"""Lines that are sent again directly to the idle fleet. The answers must be the same."""
LINE_PREFIX: Final = "batch_req_"


@dataclass(frozen=True, slots=True)
class Death:
    """A process that was killed.

    Attributes:
      fault: the fault and its proof.
      num_done: lines that had a result at that time.
      back_s: time from the signal until the restarted process is ready.
    """

    fault: Injected
    num_done: int
    back_s: float


@dataclass(slots=True)
class BatchVerdict:
    """Result of a batch.

    Attributes:
      num_servers: servers that shared the port.
      num_lines: lines of the batch.
      deaths: killed processes, in order.
      elapsed_s: time from creation to end.
      num_computed: answers in the server's log; more than `num_lines` if a process was killed
        between an answer and its transaction.
      wrongs: descriptions of what was wrong.
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
    triolet: Sequence[str] = TRIOLET,
    popen: type[subprocess.Popen[bytes]] = subprocess.Popen,
) -> BatchVerdict:
    """Start a fleet, run a batch, kill every process of the fleet once, and check every line.

    Args:
      num_lines: lines of the batch.
      max_tokens: maximum length of an answer; the minimum is half of it.
      num_servers: servers that share the port and the database.
      seed: random seed of the lines and the order of kills.
      out: folder of the database and the log.
      options: further options of `triolet serve`.
      triolet: the `triolet` command.
      popen: starts its process.

    Raises:
      ServerDidNotStartError: the fleet did not start; has the end of its log.
      HasNotHappenedError: a fault had no effect, a process did not come back, or the batch stopped.
    """
    verdict = BatchVerdict(num_servers, num_lines)
    lines = draw_lines(num_lines, seed, max_tokens)
    serve = [
        *("--batch-dir", str(out / f"jobs-{num_servers}"), "--servers", str(num_servers)),
        *("--log-level", "info", *options),
    ]
    log = out / f"batch-{num_servers}.log"
    with running(ServerProcess([*triolet, "serve", *serve], log, popen=popen)) as fleet:
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
            verdict.wrongs.append(f"{leased} blocks are leased but nothing runs")
        verdict.wrongs += await violations_now(fleet.url)
        verdict.num_computed = sum(
            str(entry["client_request_id"]).startswith(LINE_PREFIX)
            for outcome in ("stop", "length")
            for entry in fleet.log.of("request_ended", outcome=outcome)
        )
    return verdict


async def _kill_everything(
    client: BatchClient, fleet: ServerProcess, batch_id: str, rng: Random, verdict: BatchVerdict
) -> None:
    names = sorted(fleet.log.pids())
    last = [name for name in names if name.startswith("prefill-")]
    victims = [*(name for name in names if name not in last), SUPERVISOR]
    rng.shuffle(victims)
    # Without prefill the batch continues on decode alone and might end before the next kill.
    victims += last
    for number, victim in enumerate(victims, 1):
        due = verdict.num_lines * number // (len(victims) + 1)
        batch = await client.wait(batch_id, partial(_is_at, due))
        if has_ended(batch):
            verdict.wrongs.append(f"the batch had ended before {victim} was killed")
            return
        began_at = trio.current_time()
        if victim == SUPERVISOR:
            fault = await kill_supervisor(fleet)
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
            verdict.wrongs.append(f"{line['custom_id']} differs from a direct request's answer")


def said(answer: Mapping[str, Any]) -> object:
    """Return an answer without the fields that differ each time, for comparison."""
    usage = answer["usage"]
    return answer["choices"], usage["prompt_tokens"], usage["completion_tokens"]


def wrongs_of(
    lines: Sequence[Mapping[str, Any]],
    batch: Mapping[str, Any],
    good: Sequence[Mapping[str, Any]],
    bad: Sequence[Mapping[str, Any]],
) -> list[str]:
    """Return the faults of a finished batch; empty if every line was answered exactly once.

    Args:
      lines: requested lines.
      batch: the batch as returned by the server.
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

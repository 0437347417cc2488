"""A client of files and batches that outlives its server: lines in, results out.

Knows the API's form; judges nothing.
"""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any, Final

import httpx2
import trio

from ..prompts import PromptMix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CHAT: Final = "/v1/chat/completions"
ENDED: Final = frozenset({"completed", "failed", "expired", "cancelled"})
TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.05
WAIT_S: Final = 900.0
"""For a batch's end, on a machine that is busy with other things too."""


class BatchTookTooLongError(Exception):
    """A batch did not get as far as it had to."""


def draw_lines(count: int, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return requests whose answers are functions of themselves, of various lengths."""
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
    """Talks to one server; an async context manager.

    Args:
      url: of it.
    """

    def __init__(self, url: str) -> None:
        self._client = httpx2.AsyncClient(base_url=url, timeout=TIMEOUT_S)

    async def __aenter__(self) -> BatchClient:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def create(self, lines: Sequence[dict[str, Any]]) -> str:
        """Store a file and begin a batch of it; return its id."""
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
        """Return a batch, or None while no server answers."""
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
        """Return a batch as soon as it is far enough, through deaths of servers.

        Raises:
          BatchTookTooLongError: it is not.
        """
        batch = None
        with trio.move_on_after(WAIT_S):
            while True:
                batch = await self.look(batch_id)
                if batch is not None and is_far_enough(batch):
                    return batch
                await trio.sleep(POLL_S)
        raise BatchTookTooLongError(f"after {WAIT_S:.0f} s the batch is {batch}")

    async def cancel(self, batch_id: str) -> dict[str, Any]:
        """Cancel a batch if it still runs, and return it once it has ended."""
        answer = await self._client.post(f"/v1/batches/{batch_id}/cancel")
        if answer.status_code != 409:  # it has ended by itself
            answer.raise_for_status()
        batch: dict[str, Any] = await self.wait(batch_id, has_ended)
        return batch

    async def results(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a result file."""
        if file_id is None:
            return []
        answer = await self._client.get(f"/v1/files/{file_id}/content")
        answer.raise_for_status()
        return [json.loads(line) for line in answer.text.splitlines()]

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to what a line asks, asked directly."""
        answer = await self._client.post(CHAT, json=body)
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        return document


def has_ended(batch: dict[str, Any]) -> bool:
    """Whether nothing will change any more."""
    return batch["status"] in ENDED


def num_done(batch: dict[str, Any]) -> int:
    """Return how many lines have their result."""
    counts = batch["request_counts"]
    return int(counts["completed"]) + int(counts["failed"])

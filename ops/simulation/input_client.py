"""A client that wants vectors: what it asks for, when it leaves; and whether it got what it must.

Knows the server's contract (server/contract/embedding.py) and the reference; knows no workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from server.contract.generation import CancelReason, input_request
from triolet.errors import RequestError
from triolet.pooling import VectorForm

from .client import DEADLINE_S, RETRY_S, Client
from .engine import reference_vector

if TYPE_CHECKING:
    from server.scheduling.embeddings import EmbeddingRun
    from server.scheduling.links import Links

EMBEDDED = "embedded"


class InputClient(Client):
    """One request for the vectors of its prompt, forwards and backwards."""

    async def run(self, fleet: Links) -> None:
        """Ask until accepted, then wait. Part of its server: dies with it."""
        try:
            run = await self._ask(fleet)
            async with trio.open_nursery() as nursery:
                if self.wish.leaves_after_s is not None:
                    nursery.start_soon(self._go, run, self.wish.leaves_after_s)
                await self._wait(run)
                nursery.cancel_scope.cancel()
        finally:
            if self.ending is None:
                self.ending = "reset"
            self.is_over.set()

    @property
    def _inputs(self) -> tuple[tuple[int, ...], ...]:
        return (self.wish.prompt_ids, self.wish.prompt_ids[::-1])

    async def _ask(self, fleet: Links) -> EmbeddingRun:
        while True:
            ids = [self._draw_request_id() for _ in self._inputs]
            requests = [
                input_request(
                    request_id, input_ids, VectorForm(), DEADLINE_S, claim=self.wish.claim
                )
                for request_id, input_ids in zip(ids, self._inputs, strict=True)
            ]
            try:
                run = fleet.embed(requests)
            except RequestError as error:
                if error.status < 503:
                    self._report(f"{self} was refused: {error.code} {error.message}")
                await trio.sleep(RETRY_S)
            else:
                self.request_id = ids[0]
                return run

    async def _go(self, run: EmbeddingRun, after_s: float) -> None:
        await trio.sleep(after_s)
        if self.ending is None:
            self.left_at = trio.current_time()
            run.cancel(CancelReason.CLIENT_GONE)

    async def _wait(self, run: EmbeddingRun) -> None:
        try:
            vectors = await run.vectors()
        except RequestError as error:
            self.ending = error.code
            self._check_failure(error)
            return
        finally:
            run.cancel(CancelReason.CLIENT_GONE)
        self.ending = EMBEDDED
        if list(vectors) != [reference_vector(input_ids) for input_ids in self._inputs]:
            self._report(f"{self} got other vectors than its inputs have")

"""The response cache in front of a model's workers: looks requests up, records new answers and
replays stored ones.

The key of an answer is a digest. Two requests have the same key if and only if they have the same
tenant, salt, model and adapter, and their answers cannot differ.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from transport.tokens import pack_tokens
from triolet.errors import RequestError
from triolet.fair_lru import Keeper

from ..contract.generation import (
    CacheOutcome,
    Delta,
    Failed,
    Finished,
    FinishReason,
)
from ..contract.output_stage import OutputStage
from ..contract.output_stream import OutputStream
from ..contract.request_events import AnswerRepeated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.audit import FleetAudit
    from triolet.config import ResponseCacheConfig

    from ..contract.generation import CancelReason, Event, GenerationRequest, OutputReader
    from ..scheduling.admission import Admission
    from ..scheduling.delivery import EmbeddingRun
    from ..scheduling.links import Links
    from ..scheduling.status import FleetStatus
    from .store import KeptAnswer, ResponseStore


EVENTS_AT_ONCE: Final = 16
"""Events per read of a replay. A slow client's buffers hold the events read, as text and copies."""
PIECE_BYTES: Final = 29
TOKEN_BYTES: Final = 4
SCORE_BYTES: Final = 55
ALTERNATIVE_BYTES: Final = 24
"""Approximate bytes in a script of a piece without its text, a token, its log probability, and an
alternative token."""


class Script(msgspec.Struct, frozen=True, array_like=True):
    """A complete answer, in the pieces in which it was sent.

    Attributes:
      deltas: text and tokens, in the pieces in which they were read.
      end: the final event, with the usage of the request that computed it.
    """

    deltas: tuple[Delta, ...]
    end: Finished


class Recording(OutputStage):
    """The output stage that records the events of one generation.

    Args:
      request: the request, with its final settings.
      max_bytes: approximate limit; a longer answer is not recorded.
      on_finished: called with the request and the complete answer if it ended without an error.
    """

    def __init__(
        self,
        request: GenerationRequest,
        max_bytes: int,
        on_finished: Callable[[GenerationRequest, Script], None],
    ) -> None:
        self._request = request
        self._room = max_bytes
        self._deltas: list[Delta] = []
        self._on_finished = on_finished

    def push(self, event: Event) -> Sequence[Event]:
        """Record an event."""
        match event:
            case Delta() if self._room > 0:
                self._deltas.append(event)
                self._room -= size_of(event)
            case Finished() if self._room > 0:
                script, self._deltas = Script(tuple(self._deltas), event), []
                self._on_finished(self._request, script)
            case _:
                self._deltas = []
        return (event,)


class Replay:
    """Replays a stored answer as a generation. It holds no lease and no reservation.

    Args:
      request: the request.
      script: the stored answer.

    Attributes:
      has_begun: always False, because no worker computes it.
    """

    has_begun: Final = False

    def __init__(self, request: GenerationRequest, script: Script) -> None:
        self.request = request
        # Token counts are those of the original request; this one waited for nothing.
        usage = script.end.usage
        self._usage = replace(usage, queue_s=0.0, ttft_s=None if usage.ttft_s is None else 0.0)
        end = replace(script.end, usage=self._usage)
        self._events: deque[Event] = deque((*script.deltas, end))

    @property
    def has_events(self) -> bool:
        """Whether events are left."""
        return bool(self._events)

    def attach(self, reader: OutputReader, index: int) -> None:
        """Notify the reader that all events are available."""
        reader.note_filled(index)

    def take_now(self) -> Sequence[Event]:
        """Return the next events."""
        count = min(EVENTS_AT_ONCE, len(self._events))
        return [self._events.popleft() for _ in range(count)]

    def cancel(self, reason: CancelReason) -> None:
        """End the replay now. Idempotent; has no effect after a terminal event."""
        if self._events and not isinstance(self._events[-1], Failed):
            error = RequestError(
                f"the answer was cancelled: {reason}", status=499, code="cancelled"
            )
            self._events.clear()
            self._events.append(Failed(error, self._usage))


def size_of(delta: Delta) -> int:
    """Return the approximate size of a delta in a script, in bytes."""
    scores = sum(SCORE_BYTES + ALTERNATIVE_BYTES * len(score.top) for score in delta.logprobs)
    return len(delta.text) + PIECE_BYTES + TOKEN_BYTES * len(delta.token_ids) + scores


NAME_BYTES: Final = 32


def name_of(request: GenerationRequest, fingerprint: str, model: str = "") -> bytes:
    """Return the cache key of a request to the model with this fingerprint.

    The model's name is part of the key because two models with the same weights may have different
    tokenizers. Priority, deadline and times are not; nor is the seed with greedy sampling.
    """
    sampling = request.sampling
    if sampling.temperature == 0:
        sampling = replace(sampling, seed=0)
    asked = msgspec.msgpack.encode(
        (
            request.scheduling.tenant,
            request.cache_salt,
            request.adapter,
            fingerprint,
            model,
            sampling,
            request.stop,
            request.skip_special_tokens,
            request.include_stop,
            sorted(request.markers or ()),
            request.watch is not None,
        )
    )
    digest = blake2b(len(asked).to_bytes(8, "big"), digest_size=NAME_BYTES)
    digest.update(asked)
    digest.update(pack_tokens(request.prompt_ids))
    return digest.digest()


NOT_SERVING: Final = frozenset({"connecting", "draining", "dead"})
"""States of workers that get no new requests. Their model is no longer, or not yet, served. A late
worker is not among them: it usually returns within a second, with the same model."""


class CachingFleet:
    """A fleet with a response cache.

    Args:
      fleet: the workers that compute answers on a miss.
      store: stored answers of all models.
      config: limits.
      model: the model's name.
    """

    def __init__(
        self,
        fleet: Links,
        store: ResponseStore,
        config: ResponseCacheConfig,
        model: str = "",
    ) -> None:
        self.store = store
        self._model = model
        self._fleet = fleet
        self._max_bytes = config.most_answer_bytes

    @property
    def admission(self) -> Admission:
        """The fleet's admission. The cache looks up prompts, and none exist at this stage."""
        return self._fleet.admission

    def submit(self, *requests: GenerationRequest) -> OutputStream:
        """Start all choices of an answer or none, or replay all of them from the cache.

        Raises:
          RequestError: a choice was refused.
        """
        ask = requests[0].cache
        if ask is None:
            return self._fleet.submit(*requests)
        fingerprint = self._fingerprint() if ask.is_reproducible else ""
        names = []
        if fingerprint:
            names = [name_of(request, fingerprint, self._model) for request in requests]
        if names and ask.may_find and (found := self._find(names)):
            for request in requests:
                self._fleet.events.publish(AnswerRepeated(request.request_id))
            ask.outcome = CacheOutcome.HIT
            ask.age_s = trio.current_time() - min(kept.since for kept in found)
            self.store.outcomes[ask.outcome] += 1
            replays = [
                Replay(request, msgspec.msgpack.decode(kept.answer, type=Script))
                for request, kept in zip(requests, found, strict=True)
            ]
            return OutputStream(replays)
        stream = self._fleet.submit(*requests)
        ask.outcome = CacheOutcome.MISS if names else CacheOutcome.BYPASS
        self.store.outcomes[ask.outcome] += 1
        for index, name in enumerate(names):
            asked, keep = stream.generations[index].request, partial(self._keep, name)
            stream.add_stage(index, Recording(asked, self._max_bytes, keep))
        return stream

    def embed(self, requests: Sequence[GenerationRequest]) -> EmbeddingRun:
        """Compute embeddings; they are not cached."""
        return self._fleet.embed(requests)

    @property
    def max_model_len(self) -> int:
        """Maximum number of prompt and completion tokens together."""
        return self._fleet.max_model_len

    def status(self) -> FleetStatus:
        """Return the fleet's status."""
        return self._fleet.status()

    def in_flight(self, tenant: str | None = None) -> int:
        """Return how many requests run or wait: of a tenant, or all."""
        return self._fleet.in_flight(tenant)

    async def audit(self, connections: int = 0) -> FleetAudit:
        """Collect the audit of every worker."""
        return await self._fleet.audit(connections)

    def _find(self, names: Sequence[bytes]) -> list[KeptAnswer]:
        """Return all of these answers, or an empty list if any is missing."""
        now = trio.current_time()
        found = [kept for name in names if (kept := self.store.find(name, now)) is not None]
        return found if len(found) == len(names) else []

    def _fingerprint(self) -> str:
        """Return the fingerprint of the served model; empty if there are none or several."""
        workers = self._fleet.status().workers
        known = {worker.fingerprint for worker in workers if worker.state not in NOT_SERVING} - {""}
        return known.pop() if len(known) == 1 else ""

    def _keep(self, name: bytes, request: GenerationRequest, script: Script) -> None:
        """Store an answer if it still matches its key."""
        is_whole = (
            script.end.reason is FinishReason.STOP
            or script.end.usage.completion_tokens == request.sampling.max_tokens
        )
        # If less was computed than requested, the request or its end has changed.
        if not is_whole or name_of(request, script.end.fingerprint, self._model) != name:
            return
        keeper = Keeper(request.scheduling.tenant.encode(), request.scheduling.cache_share)
        answer = msgspec.msgpack.encode(script)
        self.store.keep(name, answer, keeper, trio.current_time())

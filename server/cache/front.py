"""The fleet with a cache of answers in front of it.

An answer's name is a digest. Two requests have one name if and only if they are of one tenant and
salt, go to one model with one adapter, and their answers cannot differ.
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
"""Of a replay. A client that reads slowly holds what was taken, as text and in copies."""
PIECE_BYTES: Final = 29
TOKEN_BYTES: Final = 4
SCORE_BYTES: Final = 55
ALTERNATIVE_BYTES: Final = 24
"""About what a piece without its text, a token, its score and another one's beside it cost in a
script."""


class Script(msgspec.Struct, frozen=True, array_like=True):
    """A whole answer in the pieces in which it was sent.

    Attributes:
      deltas: text and tokens, in the pieces in which they were read.
      end: with the usage of the request that computed it.
    """

    deltas: tuple[Delta, ...]
    end: Finished


class Recording(OutputStage):
    """The output stage that records the events of one generation.

    Args:
      request: as it runs.
      max_bytes: about as much is written down; of a longer answer nothing is kept.
      on_finished: called with the request and the whole answer, if it had its good end.
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
        """Write down one event."""
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
    """A kept answer as a generation. It holds no lease, no reservation.

    Args:
      request: what was asked for.
      script: what was answered.

    Attributes:
      has_begun: whether a worker was ever asked to compute it: none is.
    """

    has_begun: Final = False

    def __init__(self, request: GenerationRequest, script: Script) -> None:
        self.request = request
        # The tokens are those that it took; it waited for nothing this time.
        usage = script.end.usage
        self._usage = replace(usage, queue_s=0.0, ttft_s=None if usage.ttft_s is None else 0.0)
        end = replace(script.end, usage=self._usage)
        self._events: deque[Event] = deque((*script.deltas, end))

    @property
    def has_events(self) -> bool:
        """Whether something is left of it."""
        return bool(self._events)

    def attach(self, reader: OutputReader, index: int) -> None:
        """Tell its reader: all of it is here."""
        reader.note_filled(index)

    def take_now(self) -> Sequence[Event]:
        """Return the next events."""
        count = min(EVENTS_AT_ONCE, len(self._events))
        return [self._events.popleft() for _ in range(count)]

    def cancel(self, reason: CancelReason) -> None:
        """End it now. Idempotent; nothing after a terminal event."""
        if self._events and not isinstance(self._events[-1], Failed):
            error = RequestError(f"the answer was ended: {reason}", status=499, code="cancelled")
            self._events.clear()
            self._events.append(Failed(error, self._usage))


def size_of(delta: Delta) -> int:
    """Return about how many bytes of a script it takes."""
    scores = sum(SCORE_BYTES + ALTERNATIVE_BYTES * len(score.top) for score in delta.logprobs)
    return len(delta.text) + PIECE_BYTES + TOKEN_BYTES * len(delta.token_ids) + scores


NAME_BYTES: Final = 32


def name_of(request: GenerationRequest, fingerprint: str, model: str = "") -> bytes:
    """Return the name of a request's answer by the model with this fingerprint.

    The model's own name counts too: two models with the same weights may have two tokenizers.
    Time, urgency and deadline of a request make no difference to it; nor does the seed where
    the best token is always taken.
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
"""Workers that get nothing new: their model is answered with no more, or not yet. A late worker
is mostly back in a second, with the same model."""


class CachingFleet:
    """A fleet that gives answers again.

    Args:
      fleet: which computes what is not here.
      store: what is kept, of this model and of others.
      config: bounds.
      model: its name.
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
        """The fleet's: what is kept is found by a prompt, and these have none yet."""
        return self._fleet.admission

    def submit(self, *requests: GenerationRequest) -> OutputStream:
        """Begin the choices of one answer, all of them or none; or give all of them again.

        Raises:
          RequestError: one was refused.
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
        """Begin to make vectors; they are not kept."""
        return self._fleet.embed(requests)

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._fleet.max_model_len

    def status(self) -> FleetStatus:
        """Look at the fleet."""
        return self._fleet.status()

    async def audit(self, connections: int = 0) -> FleetAudit:
        """Ask every worker for its account."""
        return await self._fleet.audit(connections)

    def _find(self, names: Sequence[bytes]) -> list[KeptAnswer]:
        """Return all of these answers, or none."""
        now = trio.current_time()
        found = [kept for name in names if (kept := self.store.find(name, now)) is not None]
        return found if len(found) == len(names) else []

    def _fingerprint(self) -> str:
        """Return what names the one model that is served; empty while none is, or two are."""
        workers = self._fleet.status().workers
        known = {worker.fingerprint for worker in workers if worker.state not in NOT_SERVING} - {""}
        return known.pop() if len(known) == 1 else ""

    def _keep(self, name: bytes, request: GenerationRequest, script: Script) -> None:
        """Keep an answer, if it is what its name says."""
        is_whole = (
            script.end.reason is FinishReason.STOP
            or script.end.usage.completion_tokens == request.sampling.max_tokens
        )
        # Less computed than was asked for changes the request, or its end.
        if not is_whole or name_of(request, script.end.fingerprint, self._model) != name:
            return
        keeper = Keeper(request.scheduling.tenant.encode(), request.scheduling.cache_share)
        answer = msgspec.msgpack.encode(script)
        self.store.keep(name, answer, keeper, trio.current_time())

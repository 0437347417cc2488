"""What an answer is called: a digest of everything that it is a function of, and of whose it is.

Knows requests; knows no bounds and no time. Two requests have one name if and only if they are of
one tenant and salt, go to one model, and their answers cannot differ.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import msgspec
import trio

from transport.tokens import pack_tokens
from triolet.fair_lru import Keeper

from ..contract.charges import NO_CHARGES
from ..contract.generation import CacheOutcome, FinishReason
from .replay import Recording, Replay, Script
from .store import ResponseStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from triolet.audit import FleetAudit
    from triolet.config import ResponseCacheConfig

    from ..contract.charges import Charges
    from ..contract.embedding import EmbeddingRequest, EmbeddingRun
    from ..contract.generation import Generation, GenerationRequest
    from ..scheduling.gate import Doorkeeper
    from ..scheduling.links import Links
    from ..scheduling.status import FleetStatus
    from .store import Kept


NAME_BYTES: Final = 32


def name_of(request: GenerationRequest, fingerprint: str) -> bytes:
    """Return the name of a request's answer by the model with this fingerprint.

    Who asks, when, how urgently and for how long makes no difference to it; nor does the seed where
    the best token is always taken.
    """
    sampling = request.sampling
    if sampling.temperature == 0:
        sampling = replace(sampling, seed=0)
    asked = msgspec.msgpack.encode(
        (
            request.scheduling.tenant,
            request.cache_salt,
            fingerprint,
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
"""Workers that get nothing new: their model is answered with no more, or not yet. Who is late will
mostly be back in a second, with the same one."""


class CachingFleet:
    """A fleet that gives answers again.

    Args:
      fleet: which computes what is not here.
      config: bounds.
      charges: told of each request that is answered from here.

    Attributes:
      store: what is kept.
      outcomes: requests by what came of them.
    """

    def __init__(
        self, fleet: Links, config: ResponseCacheConfig, charges: Charges = NO_CHARGES
    ) -> None:
        self.store = ResponseStore(config)
        self.outcomes: Counter[CacheOutcome] = Counter(dict.fromkeys(CacheOutcome, 0))
        self._fleet = fleet
        self._charges = charges
        self._max_bytes = config.most_answer_bytes

    @property
    def doorkeeper(self) -> Doorkeeper:
        """The fleet's: what is kept is found by a prompt, and these have none yet."""
        return self._fleet.doorkeeper

    def submit(self, request: GenerationRequest) -> Generation:
        """Begin a generation, or give an answer again; RequestError if it is refused."""
        [generation] = self.submit_together([request])
        return generation

    def submit_together(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """Begin several generations, all of them or none; or give all of them again.

        Raises:
          RequestError: one was refused.
        """
        ask = requests[0].cache
        if ask is None:
            return self._fleet.submit_together(requests)
        fingerprint = self._fingerprint() if ask.is_reproducible else ""
        names = [name_of(request, fingerprint) for request in requests] if fingerprint else []
        if names and ask.may_find and (found := self._find(names)):
            for request in requests:
                self._charges.repeated(request.request_id)
            ask.outcome = CacheOutcome.HIT
            ask.age_s = trio.current_time() - min(kept.since for kept in found)
            self.outcomes[ask.outcome] += 1
            return [
                Replay(request, msgspec.msgpack.decode(kept.answer, type=Script))
                for request, kept in zip(requests, found, strict=True)
            ]
        generations = self._fleet.submit_together(requests)
        ask.outcome = CacheOutcome.MISS if names else CacheOutcome.BYPASS
        self.outcomes[ask.outcome] += 1
        if not names:
            return generations
        return [
            Recording(generation, self._max_bytes, partial(self._keep, name))
            for generation, name in zip(generations, names, strict=True)
        ]

    def embed(self, requests: Sequence[EmbeddingRequest]) -> EmbeddingRun:
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

    def _find(self, names: Sequence[bytes]) -> list[Kept]:
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
            script.reason is FinishReason.STOP
            or script.usage.completion_tokens == request.sampling.max_tokens
        )
        # Whoever lets less be computed than was asked for changes the request, or its end.
        if not is_whole or name_of(request, script.fingerprint) != name:
            return
        keeper = Keeper(request.scheduling.tenant.encode(), request.scheduling.cache_share)
        answer = msgspec.msgpack.encode(script)
        self.store.keep(name, answer, keeper, trio.current_time())

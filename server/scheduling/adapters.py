"""The LoRA adapters of one model, which change while its requests run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triolet.adapter_keys import SHA256, adapters_mark, digest_bytes, mark_of
from triolet.errors import model_removed

from .outcome import drained

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from triolet.config import AdapterConfig, ServerConfig

    from ..contract.generation import GenerationRequest
    from .request import Request
    from .requests import Requests


class Adapters:
    """The adapters that requests may name, and those that workers may have.

    While a fleet loads or unloads one its workers are restarted in turn: some have exactly the
    adapters that requests may name, the others have the one that comes or goes besides.

    Args:
      config: of the server, for this model alone.
      requests: of the model.
      flush: sends what follows from their end.
    """

    def __init__(
        self,
        config: ServerConfig,
        requests: Requests,
        flush: Callable[[], None],
    ) -> None:
        self._requests = requests
        self._flush = flush
        self.use(config.model_adapters, config.unnamed_adapters)

    def use(self, named: Iterable[AdapterConfig], unnamed: Iterable[AdapterConfig]) -> None:
        """Have these adapters from now on.

        Args:
          named: that requests may name.
          unnamed: that workers may have besides.
        """
        self._named = frozenset(digest_bytes(one.digest) for one in named)
        both = self._named.union(digest_bytes(one.digest) for one in unnamed)
        self._sets = {adapters_mark(one): one for one in (self._named, both)}

    @property
    def marks(self) -> Collection[str]:
        """How fingerprints of workers end that may be used."""
        return self._sets.keys()

    def of_worker(self, fingerprint: str) -> frozenset[bytes]:
        """Return the adapters of a worker with one of these fingerprints."""
        return self._sets[mark_of(fingerprint)]

    def require_named(self, requests: Iterable[GenerationRequest], name: str) -> None:
        """Look whether requests are for adapters that may be named: one may have been unloaded
        since a request named it.

        Args:
          requests: that are to begin.
          name: of the model, for the error.

        Raises:
          RequestError: 404, one is for another.
        """
        for one in requests:
            if one.adapter and one.adapter not in self._named:
                raise model_removed(f"{name} with the adapter {SHA256}{one.adapter.hex()}")

    @property
    def held(self) -> tuple[str, ...]:
        """Digests of those that may be named, and of those that some request still has."""
        running = {one.spec.adapter for one in self._requests.table if one.spec.adapter}
        return tuple(sorted(f"{SHA256}{one.hex()}" for one in self._named | running))

    def is_leaving(self, digest: str) -> bool:
        """Whether a request has an adapter that may not be named any more."""
        own = digest_bytes(digest)
        return own not in self._named and bool(self._having(own))

    def end(self, digest: str, name: str, now: float) -> None:
        """End the requests of an adapter that may not be named any more.

        Args:
          digest: of the adapter.
          name: of it with its model, for the error.
          now: the time.
        """
        own = digest_bytes(digest)
        if own not in self._named:
            self._requests.end(self._having(own), drained(model_removed(name)), now)
            self._flush()

    def _having(self, adapter: bytes) -> list[Request]:
        return [one for one in self._requests.table if one.spec.adapter == adapter]

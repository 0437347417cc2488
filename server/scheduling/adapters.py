"""The set of LoRA adapters that requests may use, updated while requests run."""

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
    """The adapters that requests may name, and those that workers may have loaded.

    A fleet loads or unloads an adapter by restarting its workers one by one. During that time some
    workers have exactly the adapters that requests may name, and others also have the one that is
    being added or removed.

    Args:
      config: this model's server configuration.
      requests: the model's requests.
      flush: sends the frames that ending requests produces.
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
        """Replace the sets of adapters.

        Args:
          named: adapters that requests may name.
          unnamed: other adapters that workers may have loaded.
        """
        self._named = frozenset(digest_bytes(one.digest) for one in named)
        both = self._named.union(digest_bytes(one.digest) for one in unnamed)
        self._sets = {adapters_mark(one): one for one in (self._named, both)}

    @property
    def marks(self) -> Collection[str]:
        """The adapter suffixes of the worker fingerprints that are accepted."""
        return self._sets.keys()

    def of_worker(self, fingerprint: str) -> frozenset[bytes]:
        """Return the adapters of a worker with one of these fingerprints."""
        return self._sets[mark_of(fingerprint)]

    def require_named(self, requests: Iterable[GenerationRequest], name: str) -> None:
        """Raise if a request uses an adapter that can no longer be named: it may have been unloaded
        after the request was read.

        Args:
          requests: requests about to start.
          name: the model's name, for the error.

        Raises:
          RequestError: 404 if an adapter is gone.
        """
        for one in requests:
            if one.adapter and one.adapter not in self._named:
                raise model_removed(f"{name} with the adapter {SHA256}{one.adapter.hex()}")

    @property
    def held(self) -> tuple[str, ...]:
        """Digests of the adapters that requests may name or still use."""
        running = {one.spec.adapter for one in self._requests.table if one.spec.adapter}
        return tuple(sorted(f"{SHA256}{one.hex()}" for one in self._named | running))

    def is_leaving(self, digest: str) -> bool:
        """Return whether requests still use an adapter that can no longer be named."""
        own = digest_bytes(digest)
        return own not in self._named and bool(self._having(own))

    def end(self, digest: str, name: str, now: float) -> None:
        """End the requests that use an adapter that can no longer be named.

        Args:
          digest: the adapter's digest.
          name: the model and adapter names, for the error.
        """
        own = digest_bytes(digest)
        if own not in self._named:
            self._requests.end(self._having(own), drained(model_removed(name)), now)
            self._flush()

    def _having(self, adapter: bytes) -> list[Request]:
        return [one for one in self._requests.table if one.spec.adapter == adapter]

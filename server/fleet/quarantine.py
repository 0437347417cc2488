"""Prompts that killed workers and grammars that held them up, refused for a while.

Digests alone are kept: what is remembered of a client's text cannot be read back. Bounded; at the
bound the oldest is forgotten.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from transport.tokens import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config_recovery import RecoveryConfig
    from triolet.sampling import Grammar

T = TypeVar("T")


class TenantGrammar(NamedTuple):
    """A grammar as one tenant sends it: what it does there refuses nothing of another tenant.

    Attributes:
      tenant: its name; empty where there are no tenants.
      grammar: that its request carries.
    """

    tenant: str
    grammar: Grammar


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """Return what a prompt is remembered by."""
    return hashlib.blake2b(pack_tokens(prompt_ids), digest_size=16).digest()


def grammar_digest(one: TenantGrammar) -> bytes:
    """Return what a tenant's grammar is remembered by."""
    text = f"{one.tenant}\n{one.grammar.kind}\n{one.grammar.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


class Quarantine(Generic[T]):
    """The table of one kind.

    Args:
      config: how long, and how many at most.
      digest: what one of the kind is remembered by.
    """

    def __init__(self, config: RecoveryConfig, digest: Callable[[T], bytes]) -> None:
        self._digest = digest
        self._keep_s = config.quarantine_s
        self._max_refused = config.max_quarantined
        # In the order in which they are forgotten.
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, one: T, now: float) -> None:
        """Refuse one from now on."""
        digest = self._digest(one)
        self._until.pop(digest, None)
        if len(self._until) >= self._max_refused:
            del self._until[next(iter(self._until))]
        self._until[digest] = now + self._keep_s

    def remaining_s(self, one: T, now: float) -> float | None:
        """Return how long one is refused still, or None if it is not."""
        self._forget(now)
        if not self._until:  # nearly always: digests of long prompts cost time
            return None
        until = self._until.get(self._digest(one))
        return None if until is None else until - now

    def _forget(self, now: float) -> None:
        while self._until:
            digest = next(iter(self._until))
            if self._until[digest] > now:
                return
            del self._until[digest]

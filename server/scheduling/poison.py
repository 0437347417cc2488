"""Requests that may make workers fail: strikes, isolation, and the quarantine of their prompts.

The engine computes the same thing for the same tokens. So a request that is there whenever a
worker dies or a step raises at one point of its text is the cause, and one that gets past that
point is not:

    1st strike               it is tried again beside the others
    2nd strike, with others  isolated: from now on it shares no worker with another isolated one
    2nd strike, alone        quarantined
    3rd strike               quarantined

Strikes are cleared by `CLEARING_TOKENS` more tokens, and by a strike in the other role: the request
has got through the first one meanwhile. They are kept per request, not per prompt: several choices
of one prompt are struck by one event. What is quarantined is the prompt.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from transport.tokens import pack_tokens
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from triolet.config import RecoveryConfig
    from triolet.sampling import Grammar

CLEARING_TOKENS: Final = 16
"""Tokens past the strike that clear: more than a dead worker can have computed of one stream that
this server has not seen."""
ISOLATING_STRIKES: Final = 2
QUARANTINING_STRIKES: Final = 3


class PoisonDetector:
    """The strikes of one request.

    Attributes:
      strikes: workers and steps that failed while they computed it, at one point of its text.
      quarantined: it made them fail.
    """

    def __init__(self) -> None:
        self.strikes = 0
        self.quarantined = False
        self._role: Role | None = None
        self._struck_at = 0

    @property
    def isolated(self) -> bool:
        """Whether it must share no worker with another isolated request."""
        return self.strikes >= ISOLATING_STRIKES

    @property
    def is_of_prompt(self) -> bool:
        """Whether the cause of a failure may be in its prompt."""
        return self.strikes > 0 and self._role is Role.PREFILL

    def strike(self, role: Role, num_tokens: int, num_suspects: int) -> bool:
        """Note that a worker died, or its step raised, while it computed this request.

        Args:
          role: of the work: a prompt is prefill's, wherever it was computed.
          num_tokens: tokens that the request has.
          num_suspects: requests that computed there, this one included.

        Returns:
          Whether it is quarantined.
        """
        self.advanced(num_tokens)
        if role is not self._role:
            self.strikes = 0
        self._role = role
        if not self.strikes:
            self._struck_at = num_tokens
        self.strikes += 1
        enough = ISOLATING_STRIKES if num_suspects == 1 else QUARANTINING_STRIKES
        self.quarantined = self.strikes >= enough
        return self.quarantined

    def advanced(self, num_tokens: int) -> bool:
        """Note how many tokens it has; return whether that ends an isolation."""
        if not self.strikes or num_tokens - self._struck_at < CLEARING_TOKENS:
            return False
        was_isolated, self.strikes = self.isolated, 0
        return was_isolated


T = TypeVar("T")


class TenantGrammar(NamedTuple):
    """A grammar as one tenant sends it: it is refused for no other tenant.

    Attributes:
      tenant: its name; empty where there are no tenants.
      grammar: that its request carries.
    """

    tenant: str
    grammar: Grammar


def prompt_digest(prompt_ids: Sequence[int]) -> bytes:
    """Return the digest by which a prompt is remembered."""
    return hashlib.blake2b(pack_tokens(prompt_ids), digest_size=16).digest()


def grammar_digest(one: TenantGrammar) -> bytes:
    """Return the digest by which a tenant's grammar is remembered."""
    text = f"{one.tenant}\n{one.grammar.kind}\n{one.grammar.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


class Quarantine(Generic[T]):
    """Refused prompts, or refused grammars.

    Args:
      config: how long, and how many at most.
      digest: by which one is remembered.
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
        """Return for how long one is still refused, or None if it is not."""
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

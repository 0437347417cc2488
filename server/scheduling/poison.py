"""Detects whether one request crashes workers, by counting the failures ("strikes") it was part of.

The engine computes the same result for the same tokens. A request that is present whenever a worker
dies or a step raises at one point of its text is the cause; one that gets past that point is not:

    1st strike                  retried beside other requests
    2nd strike, with others     isolated: shares no worker with another isolated request
    2nd strike, alone, or 3rd   blamed: its failures are not held against other requests
    2nd death, alone, or 3rd    convicted: its tenant's requests with this prompt are refused

Only the death of a process convicts. Losing a worker is a strike at once; whether its process died
shows when it answers again, because its epoch identifies the process. The same process takes the
strike back: a link broke, a heartbeat was late, or one side was paused. If steps raise and no
process dies, a request is only blamed.

Strikes are cleared by `CLEARING_TOKENS` more tokens, and by a strike in the other role, because the
request has passed the first one meanwhile. They are kept per request, not per prompt: one event
strikes several choices of one prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Hashable

    from triolet.ids import PeerId


CLEARING_TOKENS: Final = 16
"""Tokens past the strike that clear it: more than a dead worker can have computed for one stream
without this server seeing them."""
ISOLATING_STRIKES: Final = 2
TELLING_STRIKES: Final = 3


def _are_telling(num_suspects: list[int]) -> bool:
    """Return whether strikes, given the number of suspects in each, identify the cause."""
    is_lone = len(num_suspects) >= ISOLATING_STRIKES and num_suspects[-1] == 1
    return is_lone or len(num_suspects) >= TELLING_STRIKES


class PoisonDetector:
    """The strikes against one request.

    Attributes:
      strikes: number of requests being computed, by the lost worker or failed step; all at one
        point of the request's text.
      deaths: epochs of lost workers that died.
    """

    def __init__(self) -> None:
        self.strikes: dict[Hashable, int] = {}
        self.deaths: set[PeerId] = set()
        self._role: Role | None = None
        self._struck_at = 0

    @property
    def isolated(self) -> bool:
        """Whether it must not share a worker with another isolated request."""
        return len(self.strikes) >= ISOLATING_STRIKES

    @property
    def is_blamed(self) -> bool:
        """Whether strikes identify it, and no other request, as the cause."""
        return _are_telling(list(self.strikes.values()))

    @property
    def is_convicted(self) -> bool:
        """Whether deaths alone identify it as the cause, so that its prompt is refused."""
        return _are_telling([num for life, num in self.strikes.items() if life in self.deaths])

    @property
    def is_of_prompt(self) -> bool:
        """Whether its prompt may cause the failures."""
        return bool(self.strikes) and self._role is Role.PREFILL

    def strike(self, role: Role, num_tokens: int, num_suspects: int, what: Hashable) -> None:
        """Record that a worker was lost, or its step raised, while it computed this request.

        Args:
          role: kind of work: prompts count as prefill wherever they are computed.
          num_tokens: completion tokens the request has.
          num_suspects: requests being computed there, including this one.
          what: identifies the step or the worker's epoch.
        """
        self.advanced(num_tokens)
        if role is not self._role:
            self.strikes.clear()
        self._role = role
        if not self.strikes:
            self._struck_at = num_tokens
        self.strikes[what] = num_suspects

    def settle(self, life: PeerId, *, has_died: bool) -> bool:
        """Record whether a lost worker's process died; if not, take the strike back. Return whether
        this convicts the request."""
        was_convicted = self.is_convicted
        if has_died:
            self.deaths.add(life)
        else:
            self.strikes.pop(life, None)
        return self.is_convicted and not was_convicted

    def advanced(self, num_tokens: int) -> bool:
        """Record the request's progress; return whether it ends an isolation."""
        if not self.strikes or num_tokens - self._struck_at < CLEARING_TOKENS:
            return False
        was_isolated = self.isolated
        self.strikes.clear()
        return was_isolated

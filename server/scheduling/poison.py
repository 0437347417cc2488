"""Strikes of one request: whether it is the one that makes workers fail.

The engine computes the same thing for the same tokens. So a request that is there whenever a
worker dies or a step raises at one point of its text is the cause, and one that gets past that
point is not:

    1st strike                  it is tried again beside the others
    2nd strike, with others     isolated: it shares no worker with another isolated one
    2nd strike, alone, or 3rd   blamed: what it did is held against no other request
    2nd death, alone, or 3rd    convicted: its tenant's requests with this prompt are refused

Only processes that died convict. A worker that is given up strikes at once, and whether its
process died shows when it answers again: its epoch tells another process from the same one. The
same one takes the strike back: a link broke, a heartbeat was late, or one of the two stood still.
Where steps raise and no process dies, a request is only blamed.

Strikes are cleared by `CLEARING_TOKENS` more tokens, and by a strike in the other role: the request
has got through the first one meanwhile. They are kept per request, not per prompt: several choices
of one prompt are struck by one event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Hashable

    from triolet.ids import PeerId


CLEARING_TOKENS: Final = 16
"""Tokens past the strike that clear: more than a dead worker can have computed of one stream that
this server has not seen."""
ISOLATING_STRIKES: Final = 2
TELLING_STRIKES: Final = 3


def _are_telling(num_suspects: list[int]) -> bool:
    """Return whether a request caused what struck it, each time as one of so many suspects."""
    is_lone = len(num_suspects) >= ISOLATING_STRIKES and num_suspects[-1] == 1
    return is_lone or len(num_suspects) >= TELLING_STRIKES


class PoisonDetector:
    """The strikes of one request.

    Attributes:
      strikes: how many requests were computed, by the worker that was given up or the step that
        raised while this one was among them, at one point of its text.
      deaths: lives of workers that it was struck by, and whose processes have died.
    """

    def __init__(self) -> None:
        self.strikes: dict[Hashable, int] = {}
        self.deaths: set[PeerId] = set()
        self._role: Role | None = None
        self._struck_at = 0

    @property
    def isolated(self) -> bool:
        """Whether it must share no worker with another isolated request."""
        return len(self.strikes) >= ISOLATING_STRIKES

    @property
    def is_blamed(self) -> bool:
        """Whether it, and no other request, is the cause as far as strikes tell."""
        return _are_telling(list(self.strikes.values()))

    @property
    def is_convicted(self) -> bool:
        """Whether its prompt is to be refused: deaths alone tell as much."""
        return _are_telling([num for life, num in self.strikes.items() if life in self.deaths])

    @property
    def is_of_prompt(self) -> bool:
        """Whether the cause of a failure may be in its prompt."""
        return bool(self.strikes) and self._role is Role.PREFILL

    def strike(self, role: Role, num_tokens: int, num_suspects: int, what: Hashable) -> None:
        """Note that a worker was given up, or its step raised, while it computed this request.

        Args:
          role: of the work: a prompt is prefill's, wherever it was computed.
          num_tokens: tokens that the request has.
          num_suspects: requests that computed there, this one included.
          what: names the step, or the life.
        """
        self.advanced(num_tokens)
        if role is not self._role:
            self.strikes.clear()
        self._role = role
        if not self.strikes:
            self._struck_at = num_tokens
        self.strikes[what] = num_suspects

    def settle(self, life: PeerId, *, has_died: bool) -> bool:
        """Note whether a life that was given up has died, and take the strike back if not; return
        whether that convicts it."""
        was_convicted = self.is_convicted
        if has_died:
            self.deaths.add(life)
        else:
            self.strikes.pop(life, None)
        return self.is_convicted and not was_convicted

    def advanced(self, num_tokens: int) -> bool:
        """Note how many tokens it has; return whether that ends an isolation."""
        if not self.strikes or num_tokens - self._struck_at < CLEARING_TOKENS:
            return False
        was_isolated = self.isolated
        self.strikes.clear()
        return was_isolated

"""Whether a request is what kills the workers that compute it.

When a worker dies, or a device step raises, everything that computed there is under suspicion, and
nothing is proved: it gets its new attempt as if nothing had happened, together with the others. The
engine computes the same thing for the same tokens, so a request that gets well past the token at
which it was struck was not the cause, and is cleared. So is one that is struck next in the other
role: it has got through the first one meanwhile. One that is struck again at the same place has
done it twice:

* if nothing else computed there, it is convicted;
* if others did, each of them that is struck a second time goes on *probation*: its next attempt
  shares no worker with another one on probation. Whoever is struck a third time there is convicted.

So nobody is convicted for having sat beside a culprit: neighbours that were struck once are
suspects, and are cleared as soon as they get on. Of a step that raised, the worker says who was in
it; of a death, this server knows only what it had there itself. Knows strikes and positions; what a
conviction means is recovery.py's to say.

    CLEAN ──struck──▶ SUSPECT ──struck among others──▶ ON_PROBATION ──struck──▶ CONVICTED
                         └──────struck alone──────────────────────────────────────▲
    and from each but the last ──cleared──▶ CLEAN
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from triolet.errors import LocalProtocolError
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Mapping

CLEARING_TOKENS: Final = 16
"""Tokens past the strike that clear: more than a dead worker can have computed of one stream that
this server has not seen."""


class Standing(Enum):
    """What is held of a request."""

    CLEAN = auto()
    SUSPECT = auto()
    ON_PROBATION = auto()
    CONVICTED = auto()


class Finding(Enum):
    """What changes it."""

    STRUCK_ALONE = auto()
    STRUCK_AMONG_OTHERS = auto()
    CLEARED = auto()


_S, _F = Standing, Finding

TRANSITIONS: Final[Mapping[Standing, Mapping[Finding, Standing]]] = {
    _S.CLEAN: {
        _F.STRUCK_ALONE: _S.SUSPECT,
        _F.STRUCK_AMONG_OTHERS: _S.SUSPECT,
        _F.CLEARED: _S.CLEAN,
    },
    _S.SUSPECT: {
        _F.STRUCK_ALONE: _S.CONVICTED,
        _F.STRUCK_AMONG_OTHERS: _S.ON_PROBATION,
        _F.CLEARED: _S.CLEAN,
    },
    # The others that computed beside it were not on probation.
    _S.ON_PROBATION: {
        _F.STRUCK_ALONE: _S.CONVICTED,
        _F.STRUCK_AMONG_OTHERS: _S.CONVICTED,
        _F.CLEARED: _S.CLEAN,
    },
    _S.CONVICTED: {},
}


def next_standing(standing: Standing, finding: Finding) -> Standing:
    """Return the standing that follows.

    Raises:
      LocalProtocolError: the table has no such step.
    """
    following = TRANSITIONS[standing].get(finding)
    if following is None:
        raise LocalProtocolError(f"{finding.name} is no step from {standing.name}")
    return following


class Suspicion:
    """What is held of one request.

    Attributes:
      standing: where it is.
    """

    def __init__(self) -> None:
        self.standing = Standing.CLEAN
        self._role: Role | None = None
        self._struck_at = 0

    @property
    def is_on_probation(self) -> bool:
        """Whether it must not meet another one on probation."""
        return self.standing is Standing.ON_PROBATION

    @property
    def is_of_prompt(self) -> bool:
        """Whether what a worker died of may be in its prompt."""
        return self.standing is not Standing.CLEAN and self._role is Role.PREFILL

    def struck(self, role: Role, num_tokens: int, num_suspects: int) -> Standing:
        """Note that a worker died, or its step raised, while it computed this request.

        Args:
          role: whose work it was: a prompt is prefill's, wherever it was computed.
          num_tokens: tokens that the request has.
          num_suspects: requests that computed there, this one included.
        """
        self.advanced(num_tokens)
        if role is not self._role and self.standing is not Standing.CONVICTED:
            self.standing = next_standing(self.standing, Finding.CLEARED)
        self._role = role
        is_alone = num_suspects == 1
        finding = Finding.STRUCK_ALONE if is_alone else Finding.STRUCK_AMONG_OTHERS
        if self.standing is Standing.CLEAN:
            self._struck_at = num_tokens
        self.standing = next_standing(self.standing, finding)
        return self.standing

    def advanced(self, num_tokens: int) -> bool:
        """Note how many tokens it has; return whether that ends a probation."""
        if self.standing is Standing.CLEAN or num_tokens - self._struck_at < CLEARING_TOKENS:
            return False
        was_on_probation = self.is_on_probation
        if self.standing is not Standing.CONVICTED:
            self.standing = next_standing(self.standing, Finding.CLEARED)
        return was_on_probation

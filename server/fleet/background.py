"""Who works in the background, and when it has to stand still for others.

Pure. Lines of batches are of a class that no client can ask for. Their windows are short, and
while somebody interactive waits for its first token they get little more credit: their rows pause
within a few tokens, keep their blocks, and cost next to nothing until they go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.config_batches import BACKGROUND_HOLD_S, BACKGROUND_WINDOW
from triolet.service_class import ServiceClass

from .phases import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..generation import GenerationRequest
    from .sequence import Sequence

_BEFORE_FIRST_TOKEN: Final = (Phase.QUEUED, Phase.RESERVING, Phase.PREFILLING)


def is_background(request: GenerationRequest) -> bool:
    """Return whether a request stands back for all others."""
    return request.claim.service_class is ServiceClass.BATCH


def window_of(request: GenerationRequest, token_window: int) -> int:
    """Return how far a stream may run ahead of its reader."""
    return min(token_window, BACKGROUND_WINDOW) if is_background(request) else token_window


class Background:
    """Who stands still for others now.

    Args:
      sequences: all that there are.
      is_held_back: whether one that waits does so by its own tenant's limits: nobody who stands
        still would make it go.
    """

    def __init__(
        self, sequences: Iterable[Sequence], is_held_back: Callable[[Sequence], bool]
    ) -> None:
        self._sequences = sequences
        self._is_held_back = is_held_back
        self._held: dict[Sequence, float | None] = {}

    def __bool__(self) -> bool:
        """Whether somebody stands still."""
        return bool(self._held)

    def is_urgent(self) -> bool:
        """Return whether somebody interactive waits for its first token."""
        return any(
            sequence.phase in _BEFORE_FIRST_TOKEN
            and not is_background(sequence.request)
            and not (sequence.phase is Phase.QUEUED and self._is_held_back(sequence))
            for sequence in self._sequences
        )

    def holds(self, sequence: Sequence) -> bool:
        """Return whether one that has read what it had gets no more for now."""
        if not is_background(sequence.request) or not self.is_urgent():
            return False
        self._held.setdefault(sequence, None)
        return True

    def released(self, now: float) -> list[Sequence]:
        """Return those that may go on: all once nobody is in a hurry, and each after a while. Its
        row and its blocks may be what others wait for."""
        if self._held and not self.is_urgent():
            released = list(self._held)
        else:
            released = []
            for sequence, since in self._held.items():
                if since is None:
                    self._held[sequence] = now
                elif now - since >= BACKGROUND_HOLD_S:
                    released.append(sequence)
        for sequence in released:
            del self._held[sequence]
        return released

"""Who works in the background, and when it has to stand still for others.

Pure. Lines of batches are of a class that no client can ask for. Their windows are short, and
while somebody interactive waits for its first token they get no more credit: their rows pause
within a few tokens, keep their blocks, and cost nothing until they go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from triolet.config_batches import BACKGROUND_WINDOW
from triolet.service_class import ServiceClass

from .phases import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..generation import GenerationRequest
    from .sequence import Sequence

_BEFORE_FIRST_TOKEN: Final = (Phase.QUEUED, Phase.RESERVING, Phase.PREFILLING)


def is_background(request: GenerationRequest) -> bool:
    """Return whether a request stands back for all others."""
    return request.claim.service_class is ServiceClass.BATCH


def window_of(request: GenerationRequest, token_window: int) -> int:
    """Return how far a stream may run ahead of its reader."""
    return min(token_window, BACKGROUND_WINDOW) if is_background(request) else token_window


def is_urgent(sequences: Iterable[Sequence]) -> bool:
    """Return whether somebody interactive waits for its first token."""
    return any(
        sequence.phase in _BEFORE_FIRST_TOKEN and not is_background(sequence.request)
        for sequence in sequences
    )

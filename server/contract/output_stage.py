"""The base class of output stages, which process a choice's events between the detokenizer and the
serializer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .generation import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .generation import Event


class OutputStage:
    """A step between the detokenizer and the serializer that can change, hold back or record
    events. This base class passes everything on.

    Stop strings are the first stage. They act when a token arrives, because they end the request.
    A stream's own stages (`OutputStream.add_stage`) act when its reader takes events.
    """

    def push(self, event: Event) -> Sequence[Event]:
        """Process an event; return the events for the next stage, in order."""
        return (event,)

    def finish(self) -> Sequence[Event]:
        """Return the events held back. Called once, before the last event is pushed."""
        return ()


def pass_through(stages: Sequence[OutputStage], event: Event) -> list[Event]:
    """Return the output of a chain of stages for an event."""
    passed = [event]
    for stage in stages:
        given, passed = passed, []
        for one in given:
            if not isinstance(one, Delta):
                passed += stage.finish()
            passed += stage.push(one)
    return passed

"""The stages that the events of a choice pass between the detokenizer and the serializer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .generation import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .generation import Event


class OutputStage:
    """One step on the way of a choice's events from the detokenizer to the serializer. It may
    change text, hold it back, or write it down; this one passes everything on.

    Stop strings are the first stage. They act when a token arrives, because they end the request.
    The stages of a stream (`OutputStream.add_stage`) act when its reader takes events.
    """

    def push(self, event: Event) -> Sequence[Event]:
        """Take an event; return what goes on to the next stage, in order."""
        return (event,)

    def finish(self) -> Sequence[Event]:
        """Return what was held back. Called once, before the last event is pushed."""
        return ()


def pass_through(stages: Sequence[OutputStage], event: Event) -> list[Event]:
    """Return what the last of some stages gives for an event."""
    passed = [event]
    for stage in stages:
        given, passed = passed, []
        for one in given:
            if not isinstance(one, Delta):
                passed += stage.finish()
            passed += stage.push(one)
    return passed

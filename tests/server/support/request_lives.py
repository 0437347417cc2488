"""Test helpers that publish the events of a request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from server.contract.request_events import (
    RequestAccepted,
    RequestEnded,
    RequestEvents,
    RequestFacts,
)
from triolet.service_class import ServiceClass

if TYPE_CHECKING:
    from server.contract.generation import Usage
    from server.tenants.quotas import Quotas

FACTS = RequestFacts(b"", b"", "", "demo", "", b"", "", ServiceClass.DEFAULT, False, None)


def facts_of(request_id: bytes) -> RequestFacts:
    """Return the facts of one request of many."""
    return replace(FACTS, request_id=request_id, prompt_id=request_id)


class ChargedEvents(RequestEvents):
    """Events that accounts subscribe to."""

    def __init__(self, quotas: Quotas) -> None:
        super().__init__(quotas.price)
        quotas.subscribe_to(self)

    def accept(self, request_id: bytes) -> None:
        """Publish that a request was taken on."""
        self.publish(RequestAccepted(facts_of(request_id), 16))

    def end(self, request_id: bytes, usage: Usage, *, is_begun: bool = True) -> None:
        """Publish that it ended."""
        cost = self.price(request_id, usage, is_begun=is_begun)
        facts = facts_of(request_id)
        self.publish(RequestEnded(facts, "stop", "decoding", usage, 0.5, is_begun, cost))

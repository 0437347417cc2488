"""What a trusted gateway says of a request, in headers of the Gateway API Inference Extension: an
objective, which has a service class, and a fairness id, by which requests share the queue.

The edge removes these headers unless a trusted proxy sent them.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import structlog

from triolet.service_class import CLASS_OF_NAME, ServiceClass

from .errors import echo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from werkzeug.datastructures import Headers

log = structlog.get_logger(__name__)

OBJECTIVE: Final = "x-gateway-inference-objective"
FAIRNESS_ID: Final = "x-gateway-inference-fairness-id"
_FLOW: Final = re.compile(r"[!-~]{1,255}")
MAX_LOGGED: Final = 100
"""Unknown objectives that are logged. A gateway may pass on names that its clients choose."""
current_hints: Final[ContextVar[tuple[ServiceClass | None, str]]] = ContextVar(
    "hints", default=(None, "")
)
"""Of the running task's request or WebSocket: the class of its objective, None without one that is
known; and its fairness id, empty without a valid one."""


class Objectives:
    """The objectives that the server knows.

    Args:
      names: the name of the service class of each.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._logged: set[str] = set()

    def enter(self, headers: Headers) -> None:
        """Set the hints of the running task from its request's headers. A malformed id is ignored,
        like a malformed address of a client."""
        objective, flow = headers.get(OBJECTIVE, ""), headers.get(FAIRNESS_ID, "")
        service_class = CLASS_OF_NAME.get(self._names.get(objective, ""))
        current_hints.set((service_class, flow if _FLOW.fullmatch(flow) else ""))
        if objective and service_class is None and len(self._logged) < MAX_LOGGED:
            if (shown := echo(objective)) not in self._logged:
                log.warning(
                    "objective_unknown", objective=shown, setting="server.gateway_objectives"
                )
            self._logged.add(shown)

"""Reads the request headers of an inference gateway (Gateway API Inference Extension): the
objective, which sets the service class, and the fairness id, by which requests share the queue.

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
"""Unknown objectives to log at most: a gateway may pass on names chosen by its clients."""
current_hints: Final[ContextVar[tuple[ServiceClass | None, str]]] = ContextVar(
    "hints", default=(None, "")
)
"""Hints of the running task's request or WebSocket: the class of its objective, None if the
objective is missing or unknown; and its fairness id, empty if missing or invalid."""


class Objectives:
    """The configured objectives.

    Args:
      names: name of the service class by objective.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._logged: set[str] = set()

    def enter(self, headers: Headers) -> None:
        """Set the running task's hints from its request's headers. A malformed id is ignored."""
        objective, flow = headers.get(OBJECTIVE, ""), headers.get(FAIRNESS_ID, "")
        service_class = CLASS_OF_NAME.get(self._names.get(objective, ""))
        current_hints.set((service_class, flow if _FLOW.fullmatch(flow) else ""))
        if objective and service_class is None and len(self._logged) < MAX_LOGGED:
            if (shown := echo(objective)) not in self._logged:
                log.warning(
                    "objective_unknown", objective=shown, setting="server.gateway_objectives"
                )
            self._logged.add(shown)

"""One row of the route table, and how a request finds its row. The rows are in server/routes.py."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from quart import Response

    from .schemas import StrictModel

WS: Final = "WS"
"""Stands where a method does in the row of a WebSocket."""
Method = Literal["GET", "HEAD", "POST", "DELETE"]
METHODS: Final[tuple[str, ...]] = get_args(Method)
JSON: Final = "application/json"


class Permission(Enum):
    """Whose key opens a route, on a server with tenants."""

    NONE = "none"
    """No key: whether the process is well, and pages that ask for a key themselves."""
    USER = "user"
    OPERATOR = "operator"


Dialect = Literal["openai", "anthropic", "ollama"]
"""Whose API a route belongs to: decides the form of errors and streams."""
Cost = Literal["nothing", "request", "tokens"]
"""Which of a tenant's limits a request counts in before its body is read: none, because no text is
worked on or lines of batches count themselves; those on requests; those on requests and tokens."""
RoutePart = Literal["storage", "storage or none", "page files", "document"]
"""What a handler takes first, before `services`. Without `--batch-dir` a route with "storage"
answers 404 instead."""


@dataclass(frozen=True, slots=True)
class DocumentedOperation:
    """What the OpenAPI document says of a route.

    Attributes:
      heading: under which it is shown.
      summary: one line.
      result: name of a component for JSON, or the media type of another answer.
      body: what its request is read with, or its schema; None where there is no body.
      media: of the request's body.
      status: of a good answer.
      error: name of a component for any other; None for that of the dialect.
    """

    heading: str
    summary: str
    result: str
    body: type[StrictModel] | dict[str, Any] | None = None
    _: KW_ONLY
    media: str = JSON
    status: int = 200
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Route:
    """One row.

    Attributes:
      method: GET also serves HEAD.
      path: with variable parts as werkzeug writes them.
      view: takes its part, `services` and the variable parts.
      permission: whose key opens it.
      entry: in the OpenAPI document; None for a WebSocket, for which OpenAPI has no words.
      dialect: of its errors and streams.
      cost: what it takes of its tenant's limits.
      streams: whether `stream: true` gets events.
      is_resumable: whether one of several servers keeps its answer by the idempotency key.
      is_open_to_pages: whether pages of allowed origins may use it although no key opens it.
      part: what the view takes first.
    """

    method: Method | Literal["WS"]
    path: str
    view: Callable[..., Awaitable[Response | None] | Response]
    permission: Permission
    entry: DocumentedOperation | None
    _: KW_ONLY
    dialect: Dialect = "openai"
    cost: Cost = "nothing"
    streams: bool = False
    is_resumable: bool = False
    is_open_to_pages: bool = False
    part: RoutePart | None = None

    @property
    def endpoint(self) -> str:
        """The name in the URL map and in metrics."""
        return f"{self.method} {self.path}"

    @property
    def is_for_pages(self) -> bool:
        """Whether pages of allowed origins may use it; never what is for operators."""
        return self.permission is Permission.USER or self.is_open_to_pages


class RouteTable:
    """All rows.

    Args:
      rows: in the order of the OpenAPI document.
      trees: beginnings of paths; what has no row there is answered in the form of the first row.
    """

    def __init__(self, rows: Sequence[Route], trees: Sequence[str]) -> None:
        self.rows = rows
        self._of_endpoints = {row.endpoint: row for row in rows}
        begins = {
            tree: next(row for row in rows if row.path.startswith(tree)) for tree in trees
        } | {row.path.partition("<")[0]: row for row in reversed(rows)}
        self._begins = sorted(begins.items(), key=lambda item: len(item[0]), reverse=True)
        self._root = begins["/"]

    def find(self, endpoint: str | None) -> Route | None:
        """Return the row of an endpoint; None where there is no route for path and method."""
        return self._of_endpoints.get(endpoint or "")

    def nearest(self, endpoint: str | None, path: str) -> Route:
        """Return the row of an endpoint, or else the row whose path is the longest beginning.

        The form of errors and the origins of pages are also those of a path that is not there, of
        a wrong method and of a preflight.
        """
        found = self.find(endpoint)
        if found is not None:
            return found
        return next((row for begin, row in self._begins if path.startswith(begin)), self._root)

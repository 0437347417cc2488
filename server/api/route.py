"""The types of the route table and the lookup of a row. The rows are in server/routes.py."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from quart import Response

    from .schemas import StrictModel

WS: Final = "WS"
"""The method of a WebSocket route."""
Method = Literal["GET", "HEAD", "POST", "DELETE"]
METHODS: Final[tuple[str, ...]] = get_args(Method)
JSON: Final = "application/json"


class Permission(Enum):
    """The key that a route requires on a server with tenants."""

    NONE = "none"
    """No key: for health checks, and for pages, which ask for a key themselves."""
    USER = "user"
    OPERATOR = "operator"


Dialect = Literal["openai", "anthropic", "ollama"]
"""The API that a route belongs to; sets the format of errors and streams."""
Cost = Literal["nothing", "request", "tokens"]
"""The tenant limits that a request counts against before its body is read. "nothing" is for routes
that process no text, or whose batch lines count themselves; "tokens" includes "request"."""
RoutePart = Literal["storage", "storage or none", "page files", "document"]
"""The handler's first argument, before `services`. Without `--batch-dir`, a route with "storage"
returns 404."""


@dataclass(frozen=True, slots=True)
class DocumentedOperation:
    """A route's entry in the OpenAPI document.

    Attributes:
      heading: the group in which it is listed.
      summary: one line.
      result: name of a component for JSON, or the media type of another response.
      body: the request model, or a schema; None without a body.
      media: media type of the request body.
      status: status of a successful response.
      error: name of the component for errors; None for that of the dialect.
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
    """A row of the route table.

    Attributes:
      method: GET also serves HEAD.
      path: with variables in werkzeug's syntax.
      view: the handler; takes its part, `services` and the path variables.
      permission: the required key.
      entry: entry in the OpenAPI document; None for a WebSocket, which OpenAPI cannot describe.
      dialect: the format of its errors and streams.
      cost: the tenant limits that it counts against.
      streams: whether `stream: true` returns events.
      is_resumable: whether the owner of the idempotency key answers it, of several servers.
      is_open_to_pages: whether pages of allowed origins may use it although it needs no key.
      part: the handler's first argument.
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
        """Its name in the URL map and in metrics."""
        return f"{self.method} {self.path}"

    @property
    def is_for_pages(self) -> bool:
        """Whether pages of allowed origins may use it; never true for operators' routes."""
        return self.permission is Permission.USER or self.is_open_to_pages


class RouteTable:
    """All rows.

    Args:
      rows: rows in the order of the OpenAPI document.
      trees: path prefixes; other paths below them use the error format of their first row.
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
        """Return the row of an endpoint; None if no route matches the path and method."""
        return self._of_endpoints.get(endpoint or "")

    def nearest(self, endpoint: str | None, path: str) -> Route:
        """Return the row of an endpoint, or else the row with the longest matching path prefix.

        This determines the error format and allowed origins of unknown paths, wrong methods and
        preflights.
        """
        found = self.find(endpoint)
        if found is not None:
            return found
        return next((row for begin, row in self._begins if path.startswith(begin)), self._root)

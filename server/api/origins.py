"""Which web pages may ask: their own server's and those of allowed origins (CORS).

Pure. A page on any site can send requests to localhost
(cross-site request forgery), and a name that its owner resolves to 127.0.0.1 makes that page's
origin look like ours (DNS rebinding). So behind a loopback address only known host names are
answered, and what a browser says comes from another origin is refused unless that origin is
allowed. No answer lets a browser send cookies along: keys travel in headers that pages set.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from triolet.config import ANY_ORIGIN

from .errors import echo, http_error

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from triolet.errors import RequestError

_HOST: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9-]{1,64}(?:[ \t]*,[ \t]*[A-Za-z0-9-]{1,64}){0,63}")
METHODS: Final = "GET, HEAD, POST, DELETE"
USUAL_HEADERS: Final = "authorization, content-type, x-api-key"
"""What a preflight permits that names no headers it wants to send."""
SHOWN_HEADERS: Final = ("x-", "request-id", "retry-after", "openai-processing-ms", "age", "www-")
"""How the names of those headers begin that a page's script may read, beside the few that the
standard lets it."""
LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def check_host(host: str | None, *, is_loopback: bool, own_name: str) -> None:
    """Raise the RequestError for a Host header that is none of ours.

    Args:
      host: the header, None where a client of HTTP/1.0 sent none: no browser does.
      is_loopback: whether only this machine can reach the port. If not, a proxy or another name may
        rightly stand in front, and rebinding gains nothing over asking directly.
      own_name: the configured host.
    """
    if host is None or host == "":
        return
    match = _HOST.fullmatch(host)
    if match is None:
        raise http_error(400, f"the Host header {echo(host)} is malformed")
    name = match["name"].lower()
    if is_loopback and name not in LOCAL_NAMES and name.strip("[]") != own_name.lower():
        raise http_error(403, f"this server does not answer as {echo(name)}; use localhost")


def check_origin(origin: str | None, host: str | None, allowed: Collection[str]) -> None:
    """Raise the RequestError for a request that a web page of another origin caused.

    Args:
      origin: the Origin header; None from anything but a browser.
      host: the Host header.
      allowed: other origins that may ask.
    """
    if origin is None or shown_origin(origin, allowed) is not None:
        return
    try:
        parts = urlsplit(origin)
    except ValueError:
        raise _foreign(origin) from None
    if parts.scheme not in {"http", "https"} or not host or parts.netloc.lower() != host.lower():
        raise _foreign(origin)


def shown_origin(origin: str | None, allowed: Collection[str]) -> str | None:
    """Return what `Access-Control-Allow-Origin` says to an origin; None for one not allowed."""
    if origin is None or not allowed:
        return None
    if ANY_ORIGIN in allowed:
        return ANY_ORIGIN
    return origin if origin in allowed else None


def page_headers(
    origin: str | None, allowed: Collection[str], names: Iterable[str]
) -> dict[str, str]:
    """Return the headers by which a browser shows an answer to a page of another origin.

    Args:
      origin: the Origin header of the request.
      allowed: origins that may ask; there are some.
      names: of the answer's own headers.
    """
    # Also without an Origin: what a cache keeps of that answer is not for pages.
    headers = {"vary": "Origin"}
    shown = shown_origin(origin, allowed)
    if shown is not None:
        exposed = sorted({name.lower() for name in names if name.lower().startswith(SHOWN_HEADERS)})
        headers["access-control-allow-origin"] = shown
        headers["access-control-expose-headers"] = ", ".join(exposed)
    return headers


def preflight_headers(wanted: str | None, max_age_s: int) -> dict[str, str]:
    """Return what the answer to a preflight of an allowed origin permits, beside `page_headers`.

    Args:
      wanted: names of headers that the page wants to send. Any may be: a header proves nothing of
        its sender here but its key.
      max_age_s: how long the answer holds.
    """
    is_list = wanted is not None and _HEADER_NAMES.fullmatch(wanted.strip()) is not None
    return {
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": wanted.strip() if wanted and is_list else USUAL_HEADERS,
        "access-control-max-age": str(max_age_s),
    }


def _foreign(origin: str) -> RequestError:
    return http_error(
        403, f"requests from pages of {echo(origin)} are not allowed; see --allow-origin"
    )

"""Who may ask: the checks that keep other web pages away from a server on the user's own machine.

Knows header values; decides without a framework. A page on any site can send requests to localhost
(cross-site request forgery), and a name that its owner resolves to 127.0.0.1 makes that page's
origin look like ours (DNS rebinding). So behind a loopback address only known host names are
answered, and what a browser says comes from another origin is refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from .errors import echo, http_error

if TYPE_CHECKING:
    from triolet.errors import RequestError

_HOST: Final = re.compile(r"(?P<name>[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::\d{1,5})?")
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


def check_origin(origin: str | None, host: str | None) -> None:
    """Raise the RequestError for a request that another web page caused.

    Args:
      origin: the Origin header; None from anything but a browser.
      host: the Host header.
    """
    if origin is None:
        return
    try:
        parts = urlsplit(origin)
    except ValueError:
        raise _foreign(origin) from None
    if parts.scheme not in {"http", "https"} or not host or parts.netloc.lower() != host.lower():
        raise _foreign(origin)


def _foreign(origin: str) -> RequestError:
    return http_error(403, f"requests from pages of {echo(origin)} are not allowed")

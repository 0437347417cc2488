"""Where a request carries its API key.

Knows headers by value; no framework, no tenants.
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

SUBPROTOCOL: Final = "triolet"
"""What a browser's WebSocket speaks beside the key: a browser can set no header there, and an
address, with whatever is in it, ends up in logs and histories."""
KEY_SUBPROTOCOL: Final = "triolet-key."
"""Before the key in base64url, in Sec-WebSocket-Protocol."""


def sent_key(
    authorization: str | None, x_api_key: str | None, subprotocols: Iterable[str] = ()
) -> str | None:
    """Return the key that a request carries, None for none.

    Args:
      authorization: the header; OpenAI's clients send `Bearer KEY`.
      x_api_key: the header; Anthropic's clients send the key there.
      subprotocols: what a browser's WebSocket offers.
    """
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    if x_api_key is not None:
        return x_api_key.strip()
    for offered in subprotocols:
        if offered.startswith(KEY_SUBPROTOCOL):
            return _decoded(offered.removeprefix(KEY_SUBPROTOCOL))
    return None


def _decoded(text: str) -> str | None:
    try:
        padded = text + "=" * (-len(text) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None

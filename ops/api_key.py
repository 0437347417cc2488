"""The API key that commands send to a server that asks for one, from the environment: an argument
would be visible in lists of processes."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "TRIOLET_API_KEY"


def key_headers() -> dict[str, str]:
    """Return the headers that carry the key; none if there is no key."""
    key = os.environ.get(VARIABLE, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def key_remedy(status: int) -> str | None:
    """Return what to do about a refused key; None where the status tells of no such refusal."""
    if status not in (401, 403):
        return None
    has_key = bool(key_headers())
    if status == 401 and not has_key:
        return f"set the environment variable {VARIABLE} to a key of that server"
    return f"the key is taken from the environment variable {VARIABLE}" if has_key else None

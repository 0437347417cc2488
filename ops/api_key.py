"""The API key that commands send to a server, read from TRIOLET_API_KEY.

It is not an argument because other users can see arguments in process lists.
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "TRIOLET_API_KEY"


def key_headers() -> dict[str, str]:
    """Return the authorization header, or an empty dict if no key is set."""
    key = os.environ.get(VARIABLE, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}


def key_remedy(status: int) -> str | None:
    """Return what to do about a refused key, or None if the status is another refusal."""
    if status not in (401, 403):
        return None
    has_key = bool(key_headers())
    if status == 401 and not has_key:
        return f"set the environment variable {VARIABLE} to a key of that server"
    return f"check the key in the environment variable {VARIABLE}" if has_key else None

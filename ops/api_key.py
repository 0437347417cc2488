"""The API key that commands send to a server that asks for one. The only place that reads the
environment for it: an argument would be seen by everybody who lists processes."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "TRIOLET_API_KEY"


def key_headers() -> dict[str, str]:
    """Return the headers that carry the key; none if there is no key."""
    key = os.environ.get(VARIABLE, "").strip()
    return {"authorization": f"Bearer {key}"} if key else {}

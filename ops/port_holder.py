"""Which Triolet has a port that is to be listened on, with what tells it from others."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx2
import msgspec

from .http_trust import verify_for
from .plain_text import one_line
from .running_fleets import running_fleets

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .running_fleets import RunningFleet

TIMEOUT_S: Final = 2.0
"""For one answer of a probe, which a server gives from memory, and for one step of reading it."""
MAX_ANSWER_BYTES: Final = 1024 * 1024
"""Of one answer: another program may send anything."""
MAX_NAMES: Final = 200
"""Characters of the models' names in a message of one line."""


class Holder(NamedTuple):
    """A Triolet that has a port.

    Attributes:
      words: its version, models, pid and directory, as far as they can be had.
      complaint: why it takes no requests; empty if it does.
    """

    words: str
    complaint: str


def triolet_on(url: str, port: int) -> Holder | None:
    """Return the Triolet that has a port, or None if it is another program. Asks without a key:
    another program shall not get one.

    Args:
      url: base address at which it would answer.
      port: of it.
    """
    fleets = sorted(
        (fleet for fleet in running_fleets() if fleet.note.port == port),
        key=lambda fleet: fleet.note.url != url,
    )
    fleet = fleets[0] if fleets else None
    with httpx2.Client(
        base_url=url, timeout=TIMEOUT_S, trust_env=False, verify=verify_for(url)
    ) as client:
        live, _ = _asked(client, "/health/live")
        is_triolet = live.get("status") == "live" and "model" in live
        if is_triolet:
            ready, is_ready = _asked(client, "/health/ready")
    if not is_triolet:
        complaint = "its server does not answer: it starts or shuts down"
        return None if fleet is None else Holder(_words(fleet, "", fleet.note.models), complaint)
    several = ready.get("models")
    named = several if isinstance(several, list) else [{"name": live["model"]}]
    models = [str(one["name"]) for one in named if isinstance(one, dict) and "name" in one]
    words = _words(fleet, str(live.get("version", "")), models)
    said = ready.get("error")
    complaint = str(said.get("message")) if isinstance(said, dict) else "it does not say why"
    return Holder(words, "" if is_ready else one_line(complaint))


def _words(fleet: RunningFleet | None, version: str, models: Iterable[str]) -> str:
    names = one_line(", ".join(models))[:MAX_NAMES]
    words = f"Triolet {one_line(version)[:40]}".rstrip()
    words += f", which serves {names}" if names else ""
    if fleet is None:
        return words
    pid = "" if fleet.note.pid is None else f"pid {fleet.note.pid}, "
    return f"{words} ({pid}{fleet.directory})"


def _asked(client: httpx2.Client, path: str) -> tuple[dict[str, Any], bool]:
    """Return what an address answers, if that is an object of JSON, and whether it is a success."""
    content, until = b"", time.monotonic() + TIMEOUT_S
    with suppress(httpx2.HTTPError, msgspec.MsgspecError):
        with client.stream("GET", path) as answer:
            for chunk in answer.iter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER_BYTES or time.monotonic() > until:
                    return {}, False
        return msgspec.json.decode(content, type=dict[str, Any]), answer.is_success
    return {}, False

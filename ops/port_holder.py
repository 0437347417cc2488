"""Identifies the Triolet that occupies a port, for error messages."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import httpx2
import msgspec
import trio

from triolet.plain_text import one_line

from .http_trust import verify_for
from .running_fleets import running_fleets

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .running_fleets import RunningFleet

TIMEOUT_S: Final = 2.0
"""Timeout of a probe, which a server answers from memory."""
MAX_ANSWER_BYTES: Final = 1024 * 1024
"""Limit of an answer: another program may send anything."""
MAX_NAMES: Final = 200
"""Maximum characters of model names in a message."""


class Holder(NamedTuple):
    """A Triolet that occupies a port.

    Attributes:
      words: description with version, models, pid and directory, as far as known.
      complaint: why it is not ready; empty if it is.
    """

    words: str
    complaint: str


def triolet_on(url: str, port: int) -> Holder | None:
    """Return the Triolet that occupies a port, or None for another program. Sends no API key,
    because another program could receive it.

    Args:
      url: base address to probe.
      port: the port.
    """
    fleets = sorted(
        (fleet for fleet in running_fleets() if fleet.note.port == port),
        key=lambda fleet: fleet.note.url != url,
    )
    fleet = fleets[0] if fleets else None
    live, ready, is_ready = trio.run(_probed, url)
    if not live:
        complaint = "its server does not answer: it is starting or shutting down"
        return None if fleet is None else Holder(_words(fleet, "", fleet.note.models), complaint)
    several = ready.get("models")
    named = several if isinstance(several, list) else [{"name": live["model"]}]
    models = [str(one["name"]) for one in named if isinstance(one, dict) and "name" in one]
    words = _words(fleet, str(live.get("version", "")), models)
    said = ready.get("error")
    complaint = str(said.get("message")) if isinstance(said, dict) else "no reason given"
    return Holder(words, "" if is_ready else one_line(complaint))


def _words(fleet: RunningFleet | None, version: str, models: Iterable[str]) -> str:
    names = one_line(", ".join(models))[:MAX_NAMES]
    words = f"Triolet {one_line(version)[:40]}".rstrip()
    words += f", serving {names}" if names else ""
    if fleet is None:
        return words
    pid = "" if fleet.note.pid is None else f"pid {fleet.note.pid}, "
    return f"{words} ({pid}{fleet.directory})"


async def _probed(url: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the answers to both probes and whether Triolet is ready; empty for other programs."""
    async with httpx2.AsyncClient(
        base_url=url, timeout=None, trust_env=False, verify=verify_for(url)
    ) as client:
        live, _ = await _asked(client, "/health/live")
        if live.get("status") != "live" or "model" not in live:
            return {}, {}, False
        return live, *await _asked(client, "/health/ready")


async def _asked(client: httpx2.AsyncClient, path: str) -> tuple[dict[str, Any], bool]:
    """Return the JSON object at a path (empty if it is none), and whether the status is 2xx."""
    content = b""
    with (
        trio.move_on_after(TIMEOUT_S),
        suppress(httpx2.HTTPError, msgspec.MsgspecError),
    ):
        async with client.stream("GET", path) as answer:
            async for chunk in answer.aiter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    return {}, False
        return msgspec.json.decode(content, type=dict[str, Any]), answer.is_success
    return {}, False

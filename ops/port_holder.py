"""Which Triolet has a port that is to be listened on, with what tells it from others."""

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
"""For one whole answer of a probe, which a server gives from memory."""
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
    live, ready, is_ready = trio.run(_probed, url)
    if not live:
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


async def _probed(url: str) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return what a Triolet answers to both probes, and whether it is ready; nothing of another."""
    async with httpx2.AsyncClient(
        base_url=url, timeout=None, trust_env=False, verify=verify_for(url)
    ) as client:
        live, _ = await _asked(client, "/health/live")
        if live.get("status") != "live" or "model" not in live:
            return {}, {}, False
        return live, *await _asked(client, "/health/ready")


async def _asked(client: httpx2.AsyncClient, path: str) -> tuple[dict[str, Any], bool]:
    """Return what an address answers, if that is an object of JSON, and whether it is a success."""
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

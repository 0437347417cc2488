"""Short questions to the server under test: is it ready, what does it count."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import h11
import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_BYTES = 65536
METRIC = re.compile(r"^(?P<name>[a-z_:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Sample(NamedTuple):
    """One line of /metrics."""

    name: str
    labels: dict[str, str]
    value: float


async def get(port: int, path: str, deadline_s: float = 5.0) -> tuple[int, bytes]:
    """Return status and body of a GET.

    Raises:
      OSError: nobody listens, or the connection broke.
      trio.TooSlowError: no whole answer within the deadline.
    """
    try:
        with trio.fail_after(deadline_s):
            return await _get(port, path)
    except (h11.RemoteProtocolError, trio.BrokenResourceError) as error:
        raise ConnectionError(f"no whole answer to {path}: {error}") from error


async def _get(port: int, path: str) -> tuple[int, bytes]:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        http = h11.Connection(h11.CLIENT)
        headers = [("host", f"127.0.0.1:{port}"), ("connection", "close")]
        request = h11.Request(method="GET", target=path, headers=headers)
        await stream.send_all(http.send(request) or b"")
        await stream.send_all(http.send(h11.EndOfMessage()) or b"")
        status, body = 0, b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(bytes(await stream.receive_some(READ_BYTES)))
            elif isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            else:
                return status, body


async def get_json(port: int, path: str) -> dict[str, Any]:
    """Return the JSON object that a GET answers, whatever its status."""
    _, body = await get(port, path)
    found: dict[str, Any] = json.loads(body)
    return found


async def metrics(port: int) -> list[Sample]:
    """Return everything that /metrics says now."""
    _, body = await get(port, "/metrics")
    return list(_samples(body.decode()))


def _samples(text: str) -> Iterator[Sample]:
    for match in METRIC.finditer(text):
        labels = dict(LABEL.findall(match["labels"] or ""))
        yield Sample(match["name"], labels, float(match["value"]))

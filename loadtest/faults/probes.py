"""Short questions to the server under test."""

from __future__ import annotations

import json
from typing import Any

import h11
import trio

READ_BYTES = 65536
DEADLINE_S = 30.0
"""A server answers these from memory; the machine may have other things to do."""


async def get(port: int, path: str, deadline_s: float = DEADLINE_S) -> tuple[int, bytes]:
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

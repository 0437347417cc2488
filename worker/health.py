"""Health probes of one worker: `GET /health/live` and `GET /health/ready` on a separate socket.

A small HTTP/1.1 responder: one request per connection, a bounded head, a deadline, and a fixed
number of answering tasks.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import structlog
import trio

from transport.address import IpcAddress, parse_address
from triolet.errors import ConfigError

if TYPE_CHECKING:
    from triolet.config import HealthConfig

log = structlog.get_logger()

LIVE: Final = "/health/live"
READY: Final = "/health/ready"
HEAD_END: Final = b"\r\n\r\n"
REASONS: Final = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class ProbedLoop(Protocol):
    """The worker's state, as far as probes need it."""

    @property
    def is_draining(self) -> bool:
        """Return whether it accepts no new work."""
        ...

    def overdue_s(self, now: float) -> float | None:
        """Return how long its device has been in one step, if that is too long."""
        ...


def bind_health(address: str, backlog: int) -> trio.SocketListener:
    """Bind and listen for probes.

    Args:
      address: `ipc://PATH` in a private directory, or `tcp://HOST:PORT`.
      backlog: connections that may wait.

    Raises:
      ConfigError: it cannot be bound.
    """
    place = parse_address(address)
    try:
        if isinstance(place, IpcAddress):
            place.require_private_directory()
            place.require_unused()
            place.path.unlink(missing_ok=True)  # left by a worker that was killed
            bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            bound.bind(str(place.path))
            bound.listen(backlog)
        else:
            family = socket.AF_INET6 if place.is_ipv6 else socket.AF_INET
            host = place.host.strip("[]*")
            bound = socket.create_server((host, place.port), family=family, backlog=backlog)
    except OSError as error:
        raise ConfigError(
            f"health_address {address} cannot be bound: {error.strerror}; stop the process that "
            "listens there, "
            "or choose another address"
        ) from error
    bound.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(bound))


async def answer_probes(
    listener: trio.SocketListener, loop: ProbedLoop, config: HealthConfig
) -> None:
    """Answer probes until cancelled, then close the listener."""
    turn = trio.Lock()  # Trio lets only one task wait for a socket

    async def take() -> None:
        while True:
            try:
                async with turn:
                    stream = await listener.accept()
            except OSError as error:  # no free descriptor: probes fail, the worker continues
                log.warning("probe_not_accepted", error=str(error))
                await trio.sleep(config.deadline_s)
                continue
            # Clients that leave or are too slow get no answer.
            with trio.move_on_after(config.deadline_s), suppress(trio.BrokenResourceError):
                async with stream:
                    head = await _read_head(stream, config.max_head_bytes)
                    await stream.send_all(answer(head, config.max_head_bytes, loop))

    async with listener, trio.open_nursery() as nursery:
        for _ in range(config.max_connections):
            nursery.start_soon(take)


async def _read_head(stream: trio.SocketStream, max_bytes: int) -> bytes:
    """Return the bytes up to the end of the head, the end of the stream, or one byte too many."""
    head = bytearray()
    while HEAD_END not in head and len(head) <= max_bytes:
        received = await stream.receive_some(max_bytes + 1 - len(head))
        if not received:
            break
        head += received
    return bytes(head)


def answer(head: bytes, max_bytes: int, loop: ProbedLoop) -> bytes:
    """Return the response to a request.

    Args:
      head: head of the request, or the part that arrived.
      max_bytes: size limit of a head.
      loop: main loop of the worker.
    """
    words = head.partition(b"\r\n")[0].split(b" ")
    if len(head) > max_bytes:
        return _response(
            431, {"status": "refused", "reason": f"the request head exceeds {max_bytes} bytes"}
        )
    if HEAD_END not in head or len(words) != 3 or not words[2].startswith(b"HTTP/1."):
        return _response(400, {"status": "refused", "reason": "this is not an HTTP/1.1 request"})
    path = words[1].partition(b"?")[0].decode("latin-1")
    if path not in (LIVE, READY):
        return _response(404, {"status": "refused", "reason": f"available: {LIVE} and {READY}"})
    if words[0] != b"GET":
        return _response(405, {"status": "refused", "reason": "only GET is allowed"})
    return _response(200, {"status": "live"}) if path == LIVE else _readiness(loop)


def _readiness(loop: ProbedLoop) -> bytes:
    overdue_s = loop.overdue_s(trio.current_time())
    if overdue_s is not None:
        reason = f"the device has been in one step for {overdue_s:.1f} s"
        return _response(503, {"status": "hung", "reason": reason})
    if loop.is_draining:
        return _response(503, {"status": "draining", "reason": "the worker accepts no new work"})
    return _response(200, {"status": "ready"})


def _response(status: int, said: dict[str, str]) -> bytes:
    body = msgspec.json.encode(said) + b"\n"
    allow = "Allow: GET\r\n" if status == 405 else ""
    head = (
        f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\n{allow}"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body

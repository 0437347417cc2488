"""Asks the other servers on this port what each knows of itself, and passes on what is theirs.

Knows their own sockets and a little HTTP; what is asked and what comes of it is the surface's.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import h11
import structlog
import trio

from .sibling_answer import SiblingAnswer

if TYPE_CHECKING:
    from triolet.config_siblings import SiblingConfig

log = structlog.get_logger(__name__)

READ_BYTES: Final = 65_536
MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
"""Metrics of a server with a thousand workers take 2 MiB."""


class Siblings:
    """All servers on this port but this one.

    Args:
      config: who they are.
    """

    def __init__(self, config: SiblingConfig) -> None:
        self.own_name = config.name
        self._paths = {name: path for name, path in config.paths if name != config.name}
        self._ask_timeout_s = config.ask_timeout_s
        self._answers: set[SiblingAnswer] = set()
        self._ended = trio.Event()

    def owner_of(self, key: str) -> str | None:
        """Return which of the others keeps what a key names; None if this one does.

        All of them say the same of a key, whoever lives and whoever is asked.
        """
        names = (self.own_name, *self._paths)
        owner = max(names, key=lambda name: blake2b(f"{name}\0{key}".encode()).digest())
        return None if owner == self.own_name else owner

    async def reach(self, name: str, patience_s: float) -> SiblingAnswer:
        """Open a connection to one of the others, which may say nothing for so long.

        Raises:
          OSError: nobody is there, or too many wait already.
        """
        stream = await trio.open_unix_socket(self._paths[name])
        answer = SiblingAnswer(stream, patience_s, self._end)
        self._answers.add(answer)
        return answer

    async def drain(self, within_s: float) -> None:
        """Wait until all answers of others that are passed on here are over, or the time is."""
        with trio.move_on_after(within_s):
            while self._answers:
                await self._ended.wait()

    def _end(self, answer: SiblingAnswer) -> None:
        self._answers.discard(answer)
        self._ended.set()
        self._ended = trio.Event()

    async def ask(self, target: str) -> dict[str, bytes | None]:
        """GET something of each at once.

        Returns:
          The bodies by name; None of who did not answer in time, or not with 200.
        """
        answers: dict[str, bytes | None] = dict.fromkeys(self._paths)

        async def ask_one(name: str, path: str) -> None:
            try:
                answers[name] = await _get(path, target)
            except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as error:
                log.info("sibling_silent", server=name, reason=str(error))

        with trio.move_on_after(self._ask_timeout_s):
            async with trio.open_nursery() as nursery:
                for name, path in self._paths.items():
                    nursery.start_soon(ask_one, name, path)
        return answers


async def _get(path: str, target: str) -> bytes | None:
    """Return the body of an answer with 200, or None for any other."""
    connection = h11.Connection(h11.CLIENT)
    headers = [("host", "localhost"), ("connection", "close")]
    head = connection.send(h11.Request(method="GET", target=target, headers=headers))
    end = connection.send(h11.EndOfMessage())
    body = bytearray()
    is_good = False
    async with await trio.open_unix_socket(path) as stream:
        await stream.send_all((head or b"") + (end or b""))
        while len(body) <= MAX_ANSWER_BYTES:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(READ_BYTES))
            elif isinstance(event, h11.Response):
                is_good = event.status_code == 200
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return bytes(body) if is_good else None
    return None

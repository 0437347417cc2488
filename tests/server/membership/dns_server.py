"""Test helper: a real DNS server on loopback, over UDP and TCP, with answers chosen by the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import dns.flags
import dns.message
import dns.rrset
import trio
from dns.rcode import NOERROR, NXDOMAIN
from dns.rdatatype import to_text

if TYPE_CHECKING:
    from dns.message import Message
    from dns.rcode import Rcode

MAX_UDP_BYTES: Final = 512


class DnsServer:
    """A DNS server for a few names.

    Args:
      port: its port on 127.0.0.1; 0 takes any free one.

    Attributes:
      records: records by name and type, such as `{("p.test", "A"): ["127.0.0.2"]}`.
      rcode: error code to send instead of records.
      is_silent: whether to answer no question.
      num_asked: number of questions received.
    """

    def __init__(self, port: int = 0) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode: Rcode = NOERROR
        self.is_silent = False
        self.num_asked = 0
        self._late: list[tuple[bytes, object]] = []
        self._port = port
        self._udp: trio.socket.SocketType | None = None

    @property
    def address(self) -> str:
        """Its address, in the form of `dns.nameserver`."""
        return f"127.0.0.1:{self._port}"

    def addresses(self, name: str, *addresses: str) -> None:
        """Set a name's records to these IPv4 addresses."""
        self.records[(name, "A")] = list(addresses)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled, on the same port each time."""
        with trio.socket.socket(trio.socket.AF_INET, trio.socket.SOCK_DGRAM) as udp:
            [tcp] = await trio.open_tcp_listeners(self._port, host="127.0.0.1")
            self._port = tcp.socket.getsockname()[1]
            await udp.bind(("127.0.0.1", self._port))
            self._udp = udp
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.serve_listeners, self._serve_stream, [tcp])
                task_status.started()
                while True:
                    question, sender = await udp.recvfrom(MAX_UDP_BYTES)
                    self.num_asked += 1
                    answer = self._answer(question).to_wire()
                    if len(answer) > MAX_UDP_BYTES:
                        cut = dns.message.make_response(dns.message.from_wire(question))
                        cut.flags |= dns.flags.TC
                        answer = cut.to_wire()
                    if self.is_silent:
                        self._late.append((answer, sender))
                    else:
                        await udp.sendto(answer, sender)

    async def send_late(self) -> None:
        """Send the answers that were held back, except the last, whose question may still be
        waiting."""
        assert self._udp is not None
        for answer, sender in self._late[:-1]:
            await self._udp.sendto(answer, sender)
        self._late.clear()

    async def _serve_stream(self, stream: trio.SocketStream) -> None:
        length = int.from_bytes(await stream.receive_some(2), "big")
        question = await stream.receive_some(length)
        answer = self._answer(question).to_wire()
        await stream.send_all(len(answer).to_bytes(2, "big") + answer)

    def _answer(self, content: bytes) -> Message:
        question = dns.message.from_wire(content)
        answer = dns.message.make_response(question)
        [asked] = question.question
        name = str(asked.name).rstrip(".")
        answer.set_rcode(self.rcode)
        if self.rcode == NOERROR:
            found = self.records.get((name, to_text(asked.rdtype)), [])
            if found:
                kind = to_text(asked.rdtype)
                answer.answer.append(dns.rrset.from_text(asked.name, 5, "IN", kind, *found))
            elif not any(known == name for known, _ in self.records):
                answer.set_rcode(NXDOMAIN)
        return answer

"""`python -m loadtest.bench.front_source`: workers that compute nothing, for the server benchmark.

They use the real protocol over ZeroMQ, so that a server does all its usual work: leases, first
tokens from prefill, duplicate positions, credit, heartbeats. Each decode worker steps at a fixed
rate, with a different phase, and sends one frame with the next word of every stream that has
credit. Send times are recorded for the delays. For the simpler server named `peer`, the first frame
starts a stream, without prefill.

Commands are lines of JSON: `clear`, or `dump` with a path.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from transport.frames import (
    PROTOCOL_VERSION,
    Capacity,
    End,
    Ended,
    EndReason,
    FirstToken,
    Grant,
    Hello,
    Load,
    Peer,
    Prefill,
    Reserve,
    TokenCredit,
    TokenRow,
    Tokens,
    Welcome,
    WorkerHeartbeat,
)
from transport.link import PeerBusy, PeerGone
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig
from triolet.ids import AttemptKey, PeerId, Role, new_epoch

from ..harness.lines import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transport.frames import AnyFrame

IDLE_SEED: Final = 1_000_000
"""Streams with this seed or a larger one get only one token."""
WORD: Final = re.compile("\u0120[a-z]{2,12}")
"""A space and a word: tokens can be counted in a text."""
PLENTY: Final = 1 << 20


@dataclass(slots=True)
class Row:
    """A stream on a decode worker.

    Attributes:
      key: key of its attempt.
      server: routing id of its server.
      seed: number of the stream.
      words: ids to send, in a cycle.
      allowed: credit: positions below this may be sent.
      position: next position.
      is_running: whether its prefill is done.
      origin: the sequence with the same prompt, for further choices of one request.
    """

    key: AttemptKey
    server: bytes
    seed: int
    words: Sequence[int]
    allowed: int
    position: int = 0
    is_running: bool = False
    origin: AttemptKey | None = None


@dataclass(slots=True)
class Times:
    """Time of the first send of each position of each stream, on the system's monotonic clock."""

    of_stream: dict[int, array[float]] = field(default_factory=dict)

    _written: list[tuple[int, int]] = field(default_factory=list)

    def wrote(self, seed: int, position: int) -> None:
        """Add a position to the frame that is sent next."""
        self._written.append((seed, position))

    def sending(self) -> None:
        """Record the send time of the frame's positions, unless they were sent before."""
        now = time.monotonic()
        for seed, position in self._written:
            times = self.of_stream.setdefault(seed, array("d"))
            if position == len(times):
                times.append(now)
        self._written.clear()


class FakeWorker:
    """A worker that speaks the protocol but computes nothing.

    Args:
      role: prefill or decode.
      name: its name in the fleet.
      network: network to bind on.
      address: address to bind.
      times: records the send times.
      vocabulary: ids of words.
    """

    def __init__(
        self,
        role: Role,
        name: str,
        network: ZmqNetwork,
        address: str,
        times: Times,
        vocabulary: Sequence[int],
    ) -> None:
        self.rows: dict[AttemptKey, Row] = {}
        self._me = PeerId(role, name, new_epoch())
        link = LinkConfig()
        self._listener = network.listen(
            address, hwm=link.control_hwm, max_frame_bytes=link.max_control_frame_bytes
        )
        self._times = times
        self._vocabulary = vocabulary
        self._servers: dict[bytes, bool] = {}
        self._steps = 0
        self._decodes: Sequence[FakeWorker] = ()

    def feed(self, decodes: Sequence[FakeWorker]) -> None:
        """Set the decode workers of a prefill worker; it starts their streams."""
        self._decodes = decodes

    async def receive(self) -> None:
        """Receive and answer frames until cancelled."""
        while True:
            for message in await self._listener.receive_many():
                self._take(message.sender, message.frame)

    async def beat(self) -> None:
        """Send heartbeats."""
        while True:
            for server in tuple(self._servers):
                self._send(server, self._heartbeat())
            await trio.sleep(LinkConfig().heartbeat_interval_s)

    async def step(self, rate: float, phase: float) -> None:
        """Send every stream its next word, at a fixed rate."""
        due = trio.current_time() + phase / rate
        while True:
            await trio.sleep_until(due)
            due += 1 / rate
            self._steps += 1
            by_server: dict[bytes, list[TokenRow]] = {}
            for row in self.rows.values():
                if row.is_running and row.position < row.allowed and row.seed < IDLE_SEED:
                    by_server.setdefault(row.server, []).append(self._next(row))
            for server, rows in by_server.items():
                self._send(server, Tokens(self._steps, tuple(rows)))

    def _next(self, row: Row) -> TokenRow:
        position, row.position = row.position, row.position + 1
        self._times.wrote(row.seed, position)
        return TokenRow(*row.key, position, row.words[position % len(row.words)])

    def _take(self, sender: bytes, frame: AnyFrame) -> None:
        match frame:
            case Hello():
                self._servers[sender] = frame.peer.name.startswith("peer")
                capacity = Capacity(PLENTY, 16, 1024, 4096, PLENTY, PLENTY, PLENTY)
                self._send(
                    sender,
                    Welcome(Peer.of(self._me), PROTOCOL_VERSION, "fake", capacity, "ipc://none"),
                )
                self._send(sender, self._heartbeat())
            case Reserve():
                self._reserve(sender, frame)
            case Prefill():
                self._prefill(sender, frame)
            case TokenCredit():
                for credit in frame.rows:
                    row = self.rows.get(credit.key)
                    if row is not None:
                        row.allowed = max(row.allowed, credit.allowed)
            case End():
                row = self.rows.pop(frame.key, None)
                num_tokens = 0 if row is None else row.position
                self._send(sender, Ended(*frame.key, frame.reason, num_tokens, 0))

    def _reserve(self, sender: bytes, frame: Reserve) -> None:
        words = random.Random(frame.sampling.seed).sample(self._vocabulary, 64)
        row = Row(frame.key, sender, frame.sampling.seed, words, frame.allowed)
        self.rows[frame.key] = row
        self._send(sender, Grant(*frame.key, self._me.epoch, is_local=frame.fork_of is not None))
        if frame.fork_of is not None:
            row.origin = frame.fork_of.key
            origin = self.rows.get(row.origin)
            row.is_running = origin is None or origin.is_running
        elif self._servers[sender]:
            row.is_running = True
            self._send(sender, Tokens(self._steps, (self._next(row),)))

    def _prefill(self, sender: bytes, frame: Prefill) -> None:
        decode = next(d for d in self._decodes if d._me == frame.target.peer.peer_id)
        row = decode.rows.get(frame.key)
        if row is None:
            return
        first = self._next(row)
        self._send(sender, FirstToken(*frame.key, first, 0, 0.0, 0.0))
        self._send(sender, Ended(*frame.key, EndReason.HANDED_OVER, 1, 0))
        decode._send(sender, Tokens(decode._steps, (first,)))
        for other in decode.rows.values():
            if other is row or other.origin == row.key:
                other.is_running = True

    def _heartbeat(self) -> WorkerHeartbeat:
        self._steps += 1
        load = Load(free_blocks=PLENTY, running=len(self.rows), steps=self._steps)
        return WorkerHeartbeat(self._me.epoch, self._steps, False, False, load, PLENTY, PLENTY)

    def _send(self, server: bytes, frame: AnyFrame) -> None:
        self._times.sending()
        try:
            self._listener.send_nowait(server, frame)
        except (PeerGone, PeerBusy):
            self._servers.pop(server, None)
            self.rows = {key: row for key, row in self.rows.items() if row.server != server}


def word_ids(tokenizer: Path) -> list[int]:
    """Return the ids of all words in a vocabulary, sorted."""
    vocabulary: dict[str, int] = json.loads(tokenizer.read_text())["model"]["vocab"]
    return sorted(token_id for piece, token_id in vocabulary.items() if WORD.fullmatch(piece))


async def run(arguments: argparse.Namespace) -> None:
    """Serve until stdin ends."""
    times = Times()
    vocabulary = word_ids(arguments.model / "tokenizer.json")
    network = ZmqNetwork(LinkConfig())
    folder = arguments.sockets

    def worker(role: Role, number: int) -> FakeWorker:
        name = f"{role}-{number}"
        return FakeWorker(role, name, network, f"ipc://{folder}/{name}", times, vocabulary)

    decodes = [worker(Role.DECODE, number) for number in range(arguments.workers)]
    prefill = worker(Role.PREFILL, 0)
    prefill.feed(decodes)
    try:
        async with trio.open_nursery() as nursery:
            for one in (*decodes, prefill):
                nursery.start_soon(one.receive)
                nursery.start_soon(one.beat)
            for number, decode in enumerate(decodes):
                nursery.start_soon(decode.step, arguments.rate, number / len(decodes))
            await _obey(times)
            nursery.cancel_scope.cancel()
    finally:
        network.close()


async def _obey(times: Times) -> None:
    say({})
    while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        request = json.loads(line)
        if request["do"] == "clear":
            times.of_stream.clear()
        else:
            known = {seed: sent.tolist() for seed, sent in times.of_stream.items()}
            await trio.Path(request["path"]).write_text(json.dumps(known))
        say({})


def main() -> None:
    """Parse the command line and run the workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="directory with a tokenizer.json")
    parser.add_argument("sockets", type=Path, help="directory for ipc sockets, of mode 0700")
    parser.add_argument("--workers", type=int, default=4, help="decode workers (4)")
    parser.add_argument("--rate", type=float, default=10.0, help="steps per second (10)")
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()

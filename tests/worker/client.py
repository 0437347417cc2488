"""A minimal server for tests of workers: it greets them, starts attempts and records answers.

Uses the protocol only.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from transport.frames import (
    AttemptRow,
    CreditRow,
    Ended,
    FirstToken,
    Goodbye,
    Grant,
    KvTarget,
    Prefill,
    Refuse,
    Reserve,
    ServerHeartbeat,
    TokenCredit,
    Tokens,
    Welcome,
    WorkerHeartbeat,
)
from transport.handshake import make_hello
from transport.link import PeerGone
from transport.tokens import pack_tokens
from triolet.ids import AttemptKey, PeerId, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transport.frames import AnyFrame
    from transport.link import Connection, Network
    from triolet.sampling import SamplingParams

MANY_TOKENS = 1_000_000
HWM = 10_000
MAX_FRAME_BYTES = 1 << 24


@dataclass(slots=True)
class Link:
    """One worker as the client sees it."""

    connection: Connection
    welcome: Welcome | None = None
    beats: list[WorkerHeartbeat] = field(default_factory=list)
    goodbyes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """Everything that workers have sent about one attempt."""

    key: AttemptKey
    grant: Grant | None = None
    refuse: Refuse | None = None
    first: FirstToken | None = None
    tokens: dict[int, int] = field(default_factory=dict)
    ended: dict[Role, list[Ended]] = field(
        default_factory=lambda: {Role.PREFILL: [], Role.DECODE: []}
    )

    @property
    def token_ids(self) -> list[int]:
        """Received tokens by position; positions must be contiguous."""
        start = min(self.tokens, default=0)
        assert sorted(self.tokens) == list(range(start, start + len(self.tokens)))
        return [self.tokens[position] for position in sorted(self.tokens)]


class Client:
    """A server with one prefill and one decode worker."""

    def __init__(self, network: Network, addresses: dict[Role, str], epoch: int = 7) -> None:
        self.me = PeerId(Role.SERVER, "server-0", epoch)
        self.links = {
            role: Link(
                network.connect(
                    address, self.me.identity(), hwm=HWM, max_frame_bytes=MAX_FRAME_BYTES
                )
            )
            for role, address in addresses.items()
        }
        self.answers: dict[AttemptKey, Answer] = {}
        self.live: set[AttemptKey] = set()
        self._news = trio.Event()
        self._num_requests = 0
        self._scope = trio.CancelScope()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Greet, listen and beat until cancelled."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                await self._serve(nursery, task_status)

    def vanish(self) -> None:
        """Disappear without a GOODBYE."""
        self._scope.cancel()
        for link in self.links.values():
            link.connection.close()

    def greet(self, role: Role) -> None:
        """Send HELLO to one worker."""
        self.send(role, make_hello(self.me))

    def beat(self) -> None:
        """Send heartbeats that name the wanted attempts."""
        rows = tuple(AttemptRow(*key) for key in self.live)
        for role in self.links:
            # A worker that is away for a moment gets the next one.
            with suppress(PeerGone):
                self.send(role, ServerHeartbeat(self.me.epoch, rows))

    def send(self, role: Role, frame: AnyFrame) -> None:
        """Send a frame to one worker."""
        self.links[role].connection.send_nowait(frame)

    async def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait for an answer that makes the condition true."""
        with trio.fail_after(60):
            while not condition():
                await self._news.wait()

    async def start(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        replay: Sequence[int] = (),
        allowed: int = MANY_TOKENS,
        priority: int = 0,
        remaining_s: float = 600.0,
        key: AttemptKey | None = None,
        eos_token_ids: tuple[int, ...] = (),
        adapter: bytes = b"",
    ) -> Answer:
        """Send RESERVE and, once granted, PREFILL."""
        if key is None:
            self._num_requests += 1
            key = AttemptKey(self._num_requests.to_bytes(16, "big"), 0)
        answer = self.answers.setdefault(key, Answer(key))
        self.live.add(key)
        prompt_ids = pack_tokens(prompt)
        self.send(
            Role.DECODE,
            Reserve(
                *key,
                prompt_ids,
                pack_tokens(replay),
                sampling,
                priority,
                allowed,
                remaining_s,
                eos_token_ids,
                adapter=adapter,
            ),
        )
        await self.wait_until(lambda: answer.grant or answer.refuse or answer.ended[Role.DECODE])
        if answer.grant:
            welcome = self.links[Role.DECODE].welcome
            assert welcome is not None
            target = KvTarget(welcome.peer, welcome.kv_address)
            held_blocks = answer.grant.held_blocks
            shared = (sampling, priority, remaining_s, held_blocks, eos_token_ids)
            self.send(Role.PREFILL, Prefill(*key, prompt_ids, target, *shared, adapter=adapter))
        return answer

    async def finish(self, answer: Answer) -> Answer:
        """Wait until both workers are done with an attempt."""
        await self.wait_until(lambda: answer.ended[Role.DECODE])
        await self.wait_until(lambda: answer.ended[Role.PREFILL])
        self.live.discard(answer.key)
        return answer

    def allow(self, answer: Answer, allowed: int) -> None:
        """Send token credit for a stream."""
        self.send(Role.DECODE, TokenCredit((CreditRow(*answer.key, allowed),)))

    async def _serve(self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]) -> None:
        for role, link in self.links.items():
            await link.connection.send(make_hello(self.me))
            nursery.start_soon(self._listen, role, link)
        await self.wait_until(lambda: all(link.welcome for link in self.links.values()))
        task_status.started()
        while True:
            self.beat()
            await trio.sleep(0.5)

    async def _listen(self, role: Role, link: Link) -> None:
        while True:
            for message in await link.connection.receive_many():
                self._take(role, link, message.frame)
            self._news.set()
            self._news = trio.Event()

    def _take(self, role: Role, link: Link, frame: AnyFrame) -> None:
        match frame:
            case Welcome():
                link.welcome = frame
            case WorkerHeartbeat():
                link.beats.append(frame)
            case Goodbye(reason=reason):
                link.goodbyes.append(reason)
            case Grant():
                self.answers[frame.key].grant = frame
            case Refuse():
                self.answers[frame.key].refuse = frame
            case FirstToken():
                self.answers[frame.key].first = frame
            case Ended():
                self.answers[frame.key].ended[role].append(frame)
            case Tokens(rows=rows):
                for row in rows:
                    tokens = self.answers[row.key].tokens
                    assert tokens.setdefault(row.position, row.token_id) == row.token_id
            case _:
                raise AssertionError(f"unexpected {frame}")

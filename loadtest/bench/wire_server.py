"""A server's part in one process with a worker: asks, keeps leases alive, and hears how it ends.

Speaks to the worker's control listener over memory, so that nothing but KV is on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import trio

from transport.digest import kv_key
from transport.frames import (
    AttemptRow,
    Ended,
    FirstToken,
    Goodbye,
    Grant,
    Prefill,
    Refuse,
    Reserve,
    ServerHeartbeat,
    Welcome,
)
from transport.handshake import make_hello
from transport.tokens import pack_tokens
from triolet.ids import SECRET_BYTES, AttemptKey, PeerId, Role
from triolet.sampling import SamplingParams

if TYPE_CHECKING:
    from transport.frames import AnyFrame, KvTarget
    from transport.memory_network import MemoryConnection

SERVER: Final = PeerId(Role.SERVER, "bench", 1)
KV_SECRET: Final = bytes(SECRET_BYTES)
REMAINING_S: Final = 600.0
BEAT_S: Final = 0.5
ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""Decode's part is over once it has all KV: the first token comes with it."""


@dataclass(slots=True)
class Course:
    """What was heard of one attempt; times are Trio's."""

    granted: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)
    first_token_at: float = 0.0
    ended_at: float = 0.0
    reason: str = ""


class BenchServer:
    """Asks one worker.

    Args:
      connection: to its control listener.
    """

    def __init__(self, connection: MemoryConnection) -> None:
        self._connection = connection
        self._welcome: Welcome | None = None
        self._welcomed = trio.Event()
        self._courses: dict[AttemptKey, Course] = {}

    async def run(self) -> None:
        """Listen and beat until cancelled."""
        await self._connection.send(make_hello(SERVER))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._beat)
            while True:
                for message in await self._connection.receive_many():
                    self._hear(message.frame)

    async def welcomed_by(self) -> tuple[PeerId, str]:
        """Return who answers, and where it takes KV."""
        await self._welcomed.wait()
        assert self._welcome is not None
        return self._welcome.peer.peer_id, self._welcome.kv_address

    async def reserve(self, numbers: range, num_tokens: int) -> None:
        """Get a lease for each prompt."""
        keys = [key_of(number) for number in numbers]
        for key in keys:
            self._courses[key] = Course()
            prompt = prompt_of(key, num_tokens)
            frame = Reserve(
                *key, prompt, b"", ONE_TOKEN, 0, 1, REMAINING_S, kv_key=kv_key(KV_SECRET, key)
            )
            self._connection.send_nowait(frame)
        for key in keys:
            await self._courses[key].granted.wait()

    async def prefill(
        self, numbers: range, num_tokens: int, target: KvTarget, held_blocks: int
    ) -> tuple[float, list[Course]]:
        """Have all of these prompts computed and shipped; return when it began and each's way."""
        keys = [key_of(number) for number in numbers]
        prompts = [prompt_of(key, num_tokens) for key in keys]
        began_at = trio.current_time()
        for key, prompt in zip(keys, prompts, strict=True):
            self._courses[key] = Course()
            kv = kv_key(KV_SECRET, key)
            frame = Prefill(*key, prompt, target, ONE_TOKEN, 0, REMAINING_S, held_blocks, kv_key=kv)
            self._connection.send_nowait(frame)
        return began_at, await self.finish(numbers)

    async def finish(self, numbers: range) -> list[Course]:
        """Wait until these attempts are over here, and forget them."""
        courses = [self._courses[key_of(number)] for number in numbers]
        for course in courses:
            await course.over.wait()
        for number in numbers:
            del self._courses[key_of(number)]
        return courses

    async def _beat(self) -> None:
        while True:
            rows = tuple(AttemptRow(*key) for key in self._courses)
            self._connection.send_nowait(ServerHeartbeat(SERVER.epoch, rows))
            await trio.sleep(BEAT_S)

    def _hear(self, frame: AnyFrame) -> None:
        match frame:
            case Welcome():
                self._welcome = frame
                self._welcomed.set()
            case Grant():
                self._courses[frame.key].granted.set()
            case FirstToken():
                self._courses[frame.key].first_token_at = trio.current_time()
            case Ended() if frame.key in self._courses:
                course = self._courses[frame.key]
                course.ended_at, course.reason = trio.current_time(), frame.reason.value
                course.over.set()
            case Refuse() | Goodbye():
                raise RuntimeError(f"the worker does not take part: {frame}")
            case _:
                return  # heartbeats and tokens


def key_of(number: int) -> AttemptKey:
    """Return the attempt with this number."""
    return AttemptKey(number.to_bytes(16, "big"), 0)


def prompt_of(key: AttemptKey, num_tokens: int) -> bytes:
    """Return a prompt that begins like no other one."""
    number = int.from_bytes(key.request_id, "big")
    return pack_tokens([10 + (number * 7919 + index * 31) % 1987 for index in range(num_tokens)])

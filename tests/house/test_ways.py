"""Tests that a request, a token and a cancel pass through as many files and stored callbacks of a
running server as docs/ARCHITECTURE.md states."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import trio
import trio.testing

from loadtest.bench.front_source import FakeWorker, Times, word_ids
from server.edge.tcp import PatchedTCPServer
from server.main import serve
from server.scheduling.frames import FrameOutbox
from transport.frames import End, Reserve, Tokens
from transport.zmq_network import ZmqNetwork
from triolet.config import LinkConfig, ServerConfig
from triolet.ids import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

    from transport.frames import AnyFrame

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "triolet" / "demo"
FOLDERS = tuple(f"{ROOT}/{name}/" for name in ("server", "transport", "triolet"))
TRIES = 6
"""A heartbeat may add to a path; the shortest of several attempts has none."""
MAX_CALLBACKS = 1
PATIENCE_S = 60.0
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
POST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
)


class Way:
    """Records the code that runs from now until a function returns.

    Args:
      end: the function.
      kind: type of frame it is called with; None for any call.

    Attributes:
      files: files with a function that ran.
      callbacks: functions that ran because an object had stored them.
    """

    def __init__(self, end: Callable[..., object], kind: type[AnyFrame] | None = None) -> None:
        self.files: set[str] = set()
        self.callbacks: set[str] = set()
        self.is_over = trio.Event()
        self._end, self._kind = end.__code__, kind
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDERS):
            self.files.add(code.co_filename)
            if code in kept_by(frame.f_back):
                self.callbacks.add(code.co_qualname)
        is_end = event == "return" and code is self._end
        if is_end and (self._kind is None or isinstance(frame.f_locals["frame"], self._kind)):
            sys.setprofile(None)
            self.is_over.set()


def kept_by(caller: FrameType | None) -> Iterator[CodeType]:
    """Return the code of functions stored in the caller's object or in one of its attributes."""
    owner = None if caller is None else caller.f_locals.get("self")
    own = list(getattr(owner, "__dict__", {}).values())
    for value in own + [held for one in own for held in getattr(one, "__dict__", {}).values()]:
        function = getattr(value, "func", value)  # of a partial
        if (code := getattr(function, "__code__", None)) is not None:
            yield code


async def test_no_way_is_longer_than_the_tour_says(tmp_path: Path) -> None:
    ways: dict[str, list[Way]] = {"request": [], "token": [], "cancel": []}
    addresses = [f"ipc://{tmp_path}/{role}" for role in (Role.PREFILL, Role.DECODE)]
    config = ServerConfig(
        model_dir=str(DEMO),
        model_name="demo",
        port=0,
        prefill_addresses=(addresses[0],),
        decode_addresses=(addresses[1],),
    )
    network, words = ZmqNetwork(LinkConfig()), word_ids(DEMO / "tokenizer.json")
    prefill, decode = (
        FakeWorker(role, role.value, network, address, Times(), words)
        for role, address in zip((Role.PREFILL, Role.DECODE), addresses, strict=True)
    )
    prefill.feed([decode])
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for run in (prefill.receive, prefill.beat, decode.receive, decode.beat):
                nursery.start_soon(run)
            url = await nursery.start(serve, config)
            for _ in range(TRIES):
                await walk(int(url.rpartition(":")[2]), decode, ways)
            nursery.cancel_scope.cancel()
    network.close()
    tour = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    for name, walked in ways.items():
        [told] = re.findall(rf"\| {name} \| .* \| (\d+) \|", tour)
        shortest = min(walked, key=lambda way: len(way.files))
        assert len(shortest.files) <= int(told), sorted(shortest.files)
        assert name != "token" or len(shortest.callbacks) <= MAX_CALLBACKS, shortest.callbacks


async def walk(port: int, decode: FakeWorker, ways: dict[str, list[Way]]) -> None:
    """Send a request, let it get a token, and close its connection."""
    client = await trio.open_tcp_stream("127.0.0.1", port)
    await trio.testing.wait_all_tasks_blocked(0.01)
    ways["request"].append(way := Way(FrameOutbox.send, Reserve))
    await client.send_all(b"%bContent-Length: %d\r\n\r\n%b" % (POST, len(BODY), BODY))
    await way.is_over.wait()
    received = b""
    while received.count(b"data: ") < 2:
        received += await client.receive_some()
    await trio.testing.wait_all_tasks_blocked(0.01)
    *_, row = decode.rows.values()
    decode._send(row.server, Tokens(1, (decode._next(row),)))
    ways["token"].append(way := Way(PatchedTCPServer._send_now))
    await way.is_over.wait()
    await trio.testing.wait_all_tasks_blocked(0.01)
    ways["cancel"].append(way := Way(FrameOutbox.send, End))
    await client.aclose()
    await way.is_over.wait()

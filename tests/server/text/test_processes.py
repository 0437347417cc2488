"""Tests of text processes, which tokenize and parse: results are correct, and long jobs do not
block others."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from server.api.json_body import checked_fields, parse_object
from server.text import pieces
from server.text.pieces import PIECE_BYTES, PIECE_ITEMS, Reader, pieces_of
from server.text.process import NICENESS
from server.text.processes import PROGRAM, TextProcesses
from server.text.tokenizer import INLINE_IDS, INLINE_WEIGHT, TextModel
from tests.server.support.held_work import HeldWork, held_work
from triolet.config import ServerConfig
from triolet.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "triolet" / "demo"

SMALL = st.none() | st.integers(-(10**50), 10**50) | st.text(max_size=9) | st.binary(max_size=9)
PLAIN = st.recursive(
    SMALL,
    lambda inner: (
        st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner, max_size=5)
    ),
)


@given(st.lists(PLAIN, max_size=5), st.integers(1, 50))
def test_whatever_is_sent_in_pieces_comes_back(values: list[object], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_ITEMS", 2)
        sent = b"".join(pieces_of(values))
    reader = Reader()
    *before, last = [reader.feed(sent[at : at + size]) for at in range(0, len(sent), size)]
    assert last == values
    assert set(map(type, before)) <= {type(None)}, "complete only with the last piece"


@pytest.mark.parametrize(
    ("item", "count"),
    [({"role": "user", "content": "a"}, 10 * PIECE_ITEMS), ({"text": "é" * PIECE_BYTES}, 10)],
)
def test_a_long_list_is_packed_some_elements_at_a_time(item: object, count: int) -> None:
    sent = list(pieces_of([[item] * count]))
    assert sum(map(bool, sent)) == 2 + 10
    assert Reader().feed(b"".join(sent)) == [[item] * count]


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[TextProcesses]:  # noqa: ANN401
    processes = TextProcesses(ServerConfig(text_processes=1, **settings))
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        yield processes
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_work_is_done_refused_or_fails_as_it_would_here() -> None:
    content = "é" * 10**6
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 5}
    body = json.dumps(asked).encode()
    async with running() as processes:
        fields, ignored = await processes.do(checked_fields, "ChatRequest", body, False)
        assert (fields, ignored) == (asked, [])
        for wrong, message in ((b'{"messages": 5}', "must be a list"), (b"[", "not valid JSON")):
            with pytest.raises(RequestError, match=message) as refusal:
                await processes.do(checked_fields, "ChatRequest", wrong, False)
            assert refusal.value.status == 400
        assert await processes.do(parse_object, b'{"x": %d}' % 10**50) == {"x": 10**50}
        with pytest.raises(RuntimeError, match="KeyError"):
            await processes.do(checked_fields, "NoRequest", b"{}", False)


def test_a_process_knows_every_kind_of_request_that_is_read() -> None:
    kinds = set()
    for path in (ROOT / "server").rglob("*.py"):
        kinds |= set(re.findall(r"read_fields\((\w+), services\)", path.read_text()))
    program = f"import {PROGRAM}; from server.api.schemas import StrictModel as s; print(*s.kinds)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert len(kinds) > 10
    assert kinds <= set(found.stdout.split())


def test_a_process_loads_nothing_that_only_a_server_needs() -> None:
    # They start with every server, while workers load their models.
    unwanted = {"quart", "structlog", "trio", "werkzeug"}
    program = f"import sys, {PROGRAM}; print(*{unwanted} & {{*sys.modules}})"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout.split() == []


@pytest.mark.slow
async def test_texts_are_the_same_elsewhere_and_special_tokens_stay_apart() -> None:
    async with running() as processes:
        here, there = TextModel.load(DEMO), TextModel.load(DEMO, do=processes.do)
        # The templates do not show `more`; it only makes the turn large.
        turn = {"role": "user", "content": "a <|end|> b " * 500, "more": "x" * INLINE_WEIGHT}
        ids = []
        for text in (here, there):
            prompt = await text.render_chat([turn, turn])
            ids.append(await text.encode(prompt, add_special_tokens=False))
        assert len(ids[0]) > INLINE_IDS
        assert ids[0] == ids[1]
        assert await there.decode(ids[1]) == await here.decode(ids[0])


async def own_processes() -> list[int]:
    """Return the text processes started by this process, once there are any."""
    with trio.fail_after(60.0):
        while not (found := _found_processes()):
            await trio.lowlevel.checkpoint()
    return found


def _found_processes() -> list[int]:
    # Look at each thread: Trio decides which one started a process, and whether it has ended since.
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            for pid in (thread / "children").read_text().split():
                if PROGRAM.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
    return sorted(found)


async def served(processes: TextProcesses) -> None:
    """Wait until a process runs jobs: on a busy machine its start takes longer than a job may."""
    with trio.fail_after(60.0):
        while True:
            with suppress(RequestError):
                await processes.do(parse_object, b"{}")
                return


@pytest.mark.slow
async def test_a_process_that_ends_or_hangs_is_replaced() -> None:
    async with running(text_timeout_s=2.0) as processes:
        await served(processes)
        [first] = await own_processes()
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(RequestError, match="messages takes longer than 2 s") as hung:
            await processes.do(parse_object, b"{}", param="messages")
        assert (hung.value.status, hung.value.param) == (400, "messages")
        await served(processes)
        [second] = await own_processes()
        os.kill(second, signal.SIGKILL)
        with pytest.raises(RequestError, match="has ended") as ended:
            await processes.do(parse_object, b"{}")
        assert ended.value.status == 503
        await served(processes)
    assert len({first, second}) == 2


async def let_one_go(held: HeldWork, after_s: float) -> None:
    await trio.sleep(after_s)
    held.may.release()


async def test_what_got_its_turn_late_is_told_to_come_again(autojump_clock: MockClock) -> None:
    async with held_work(text_timeout_s=10.0) as held, trio.open_nursery() as nursery:
        nursery.start_soon(held.do, parse_object, b"{}")
        await wait_all_tasks_blocked()
        nursery.start_soon(let_one_go, held, 9.0)
        with pytest.raises(RequestError, match="too many texts are waiting") as late:
            await held.do(parse_object, b"{}")
        assert (late.value.status, held.turns.num_running) == (503, 1)
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_an_answer_beyond_the_bound_ends_its_process_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "MAX_BYTES", 1000)
    async with running() as processes:
        with pytest.raises(RequestError, match="has ended"):
            await processes.do(parse_object, b'{"a": "%s"}' % (b"a" * 2000))
        assert await processes.do(parse_object, b"{}") == {}


@pytest.mark.slow
async def test_a_process_may_start_for_longer_than_a_job_may_take() -> None:
    # Its imports take longer than this on any machine.
    processes = TextProcesses(ServerConfig(text_processes=1, text_timeout_s=0.2))
    processes.first = [(parse_object, (b"{}",))]
    async with trio.open_nursery() as nursery:
        await nursery.start(processes.run)
        found = None
        with trio.fail_after(60.0):
            while found is None:
                with suppress(RequestError):
                    found = await processes.do(parse_object, b"{}")
        assert found == {}
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_client_that_leaves_does_not_end_the_process() -> None:
    async with running() as processes:
        await processes.do(parse_object, b"{}")
        before = await own_processes()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(processes.do, parse_object, b"{}")
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert await processes.do(parse_object, b"{}") == {}
        assert await own_processes() == before
        assert (processes.turns.num_waiting, processes.turns.num_running) == (0, 0)


@pytest.mark.slow
async def test_a_process_stands_back_after_its_first_start_and_before_any_other() -> None:
    async with running(text_timeout_s=2.0) as processes:
        await served(processes)
        for _ in range(2):
            [pid] = await own_processes()
            assert os.getpriority(os.PRIO_PROCESS, pid) >= NICENESS
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(RequestError, match="has ended"):
                await processes.do(parse_object, b"{}")
            await served(processes)

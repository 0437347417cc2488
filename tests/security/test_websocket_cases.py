"""Tests of every conversation of the Autobahn WebSocket suite, frame by frame."""

from __future__ import annotations

import csv
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import trio

from tests.server.support.surface import PATIENCE_S, surface
from tests.server.support.websocket import PONG, frame_bytes, open_socket

from .websocket_cases import CASES, DROPPED, Case, close_frame

if TYPE_CHECKING:
    from tests.server.support.surface import Surface
    from tests.server.support.websocket import Socket

LIST: Final = Path(__file__).parents[3] / "shared/data/vectors/autobahn_cases.csv"


async def converse(server: Surface, case: Case) -> tuple[int, list[bytes], int]:
    """Run one conversation.

    Returns:
      Number of answers, pongs, and the server's close code; DROPPED without one.
    """
    opened = await open_socket(server)
    stream = opened.client.stream
    # Otherwise small pieces would be sent together, unsplit.
    stream.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    heard: list[tuple[int, list[bytes], int]] = []
    all_sent = trio.Event()
    async with stream, trio.open_nursery() as nursery:

        async def listen() -> None:
            heard.append(await hear(opened, case, all_sent))
            # What is still being sent goes nowhere.
            nursery.cancel_scope.cancel()

        nursery.start_soon(listen)
        with trio.fail_after(PATIENCE_S):
            try:
                for data in case.writes():
                    await stream.send_all(data)
            except trio.BrokenResourceError:
                assert not case.is_clean  # otherwise it may be refused before its end
            all_sent.set()
            await trio.sleep_forever()
    return heard[0]


async def hear(opened: Socket, case: Case, all_sent: trio.Event) -> tuple[int, list[bytes], int]:
    """Read until the close; send a close once everything expected has arrived."""
    answers, pongs, has_parted = 0, list[bytes](), False
    while True:
        is_all = answers == case.answers and tuple(pongs) == case.pongs
        if is_all and case.is_clean and not has_parted:
            has_parted = True
            await all_sent.wait()
            await opened.client.send(close_frame())
        try:
            frame = await opened.frame()
        except (AssertionError, trio.BrokenResourceError):
            return answers, pongs, DROPPED
        match frame.opcode:
            case 0x1:
                event = json.loads(frame.payload)
                assert (event["type"], event["status"]) == ("error", 400)
                answers += 1
            case 0xA:
                pongs.append(frame.payload)
            case 0x9:
                await opened.client.send(frame_bytes(PONG, frame.payload))
            case 0x8:
                return answers, pongs, frame.close_code if frame.payload else 1005
            case _:
                raise AssertionError(frame)


async def check(server: Surface, number: str) -> None:
    case = CASES[number]
    answers, pongs, code = await converse(server, case)
    assert code in case.codes, (number, code)
    if case.is_clean:
        assert (answers, tuple(pongs)) == (case.answers, case.pongs), number


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({number.split(".")[0] for number in CASES}))
async def test_every_conversation_ends_as_it_should(family: str) -> None:
    async with surface() as server:
        for number in CASES:
            if number.split(".")[0] == family:
                await check(server, number)
        await server.all_connections_closed()
        assert (await server.request("GET", "/health/live")).status == 200


@pytest.mark.skipif(not LIST.exists(), reason="Autobahn's list is missing beside the repository")
def test_every_case_of_the_list_is_held() -> None:
    with LIST.open(newline="") as file:
        listed = {row["case"] for row in csv.DictReader(file)}
    assert len(listed) == 140
    assert listed == {number.split("/")[0] for number in CASES}


def test_cases_are_many_and_differ() -> None:
    assert len(CASES) > 150
    assert len({(*case.frames, bytes([case.chop & 0xFF])) for case in CASES.values()}) > 130
    opcodes = {frame[0] & 0xF for case in CASES.values() for frame in case.frames}
    assert opcodes == set(range(16))

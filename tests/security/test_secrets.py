"""Tests that keys and prompts are never disclosed, even when something fails while handling
them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import trio

from ops.logs import configure_logs
from tests.server.support.fakes import FakeFleet, FakeGeneration
from tests.server.support.surface import PATIENCE_S, surface
from tests.server.support.tenants import tenancy_of
from tests.server.support.websocket import open_socket

if TYPE_CHECKING:
    import pytest

SECRET: Final = "xyzzy-4711-plugh"
KEY: Final = f"sk-{SECRET}"
FAULT: Final = "a part of ours is broken"
MESSAGES: Final = [{"role": "user", "content": SECRET}]
TURNS: Final = {"messages": MESSAGES, "user": SECRET, "metadata": {"x": SECRET}}
REQUESTS: Final = (
    ("/v1/chat/completions", TURNS | {"cache_salt": SECRET, "stop": [SECRET]}),
    ("/v1/completions", {"prompt": SECRET, "logit_bias": {"1": 1}, "suffix": ""}),
    ("/v1/responses", {"input": SECRET, "instructions": SECRET}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "system": SECRET}),
)


async def test_a_request_that_fails_inside_tells_nothing_of_its_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def break_down(generation: FakeGeneration) -> None:
        raise RuntimeError(FAULT)

    configure_logs("debug", "server")
    headers = {"Authorization": f"Bearer {KEY}", "Cookie": SECRET, "Referer": SECRET}
    async with surface(FakeFleet(break_down), tenancy=tenancy_of(a=KEY), fault=FAULT) as server:
        for path, body in REQUESTS:
            for more in ({}, {"stream": True}):
                answer = await server.post(f"{path}?k={SECRET}", body | more, headers=headers)
                assert answer.status == 500, path
                assert SECRET not in answer.body.decode()
                assert FAULT not in answer.body.decode()
        async with await open_socket(server, headers) as socket:
            await socket.send({"type": "response.create", "input": SECRET})
            with trio.fail_after(PATIENCE_S):
                while await socket.client.stream.receive_some():
                    pass
        metrics = server.services.metrics.exposition().decode()
    logged = capsys.readouterr().err
    assert SECRET not in metrics
    assert SECRET not in logged
    lines = [json.loads(line) for line in logged.splitlines()]
    assert len([line for line in lines if FAULT in line.get("exception", "")]) >= 2 * len(REQUESTS)

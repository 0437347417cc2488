"""Bodies that take long to parse: they never hold up the event loop, which keeps the workers."""

from __future__ import annotations

import json

import pytest
import trio

from server.api.body import INLINE_BYTES, MAX_KEYS, parse_object
from server.api.schemas import MAX_DETOKENIZED
from tests.server.support.surface import PATIENCE_S, Answer, surface
from triolet.errors import RequestError

SPACE = " " * INLINE_BYTES


async def test_a_large_body_is_parsed_in_a_thread_and_a_small_one_at_once() -> None:
    async with surface() as server, trio.open_nursery() as nursery:
        threads = server.services.parser_threads
        answers: list[Answer] = []

        async def post_large() -> None:
            body = json.dumps({"prompt": "A"}).encode() + SPACE.encode()
            answers.append(await server.request("POST", "/tokenize", body=body))

        async with threads:  # what needs the thread has to wait
            nursery.start_soon(post_large)
            with trio.fail_after(PATIENCE_S):
                while threads.turns.num_waiting == 0:
                    await trio.lowlevel.checkpoint()
            small = await server.post("/tokenize", {"prompt": "A"})
            assert (small.status, answers) == (200, [])
    assert [answer.json["tokens"] for answer in answers] == [[65]]


async def test_a_large_body_that_waits_too_long_is_refused() -> None:
    async with surface(body_timeout_s=0.05) as server, server.services.parser_threads:
        body = b"{}" + SPACE.encode()
        answer = await server.request("POST", "/tokenize", body=body)
    assert (answer.status, answer.error["code"]) == (503, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1


def test_an_object_with_very_many_keys_is_refused() -> None:
    most = {str(i): i for i in range(MAX_KEYS)}
    assert parse_object(json.dumps(most).encode()) == most
    with pytest.raises(RequestError, match=f"more than {MAX_KEYS} keys"):
        parse_object(json.dumps({"a": most | {"one": "more"}}).encode())


@pytest.mark.parametrize(
    "tokens", [5, ["a"], [-1] * 1000, [True], [2**31]], ids=["int", "text", "low", "bool", "high"]
)
async def test_bad_ids_make_one_error_that_names_the_list(tokens: object) -> None:
    async with surface() as server:
        answer = await server.post("/detokenize", {"tokens": tokens})
    assert (answer.status, answer.error["param"]) == (400, "tokens")


async def test_more_ids_than_one_request_may_hold_are_refused() -> None:
    body = b'{"tokens":[' + b"1," * MAX_DETOKENIZED + b"1]}"
    async with surface() as server:
        answer = await server.request("POST", "/detokenize", body=body)
    assert (answer.status, answer.error["param"]) == (400, "tokens")

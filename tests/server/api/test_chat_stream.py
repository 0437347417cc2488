"""Chat completions as a stream: order and form of the chunks, and the ends of it."""

from __future__ import annotations

from tests.server.support.surface import MODEL, surface

HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}


async def test_a_stream_is_role_text_finish_and_done() -> None:
    async with surface() as server:
        answer = await server.post("/v1/chat/completions", HELLO)
    *chunks, done = answer.events
    assert answer.status == 200
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""}, {"content": "Hello"}, {"content": " there"}, {}
    ]  # fmt: skip

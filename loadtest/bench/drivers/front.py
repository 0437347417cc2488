"""`python -m loadtest.bench.drivers.front`: a minimal server in FastAPI or Starlette.

The server benchmark compares Triolet with it, on the same workers (front_source). Runs in an
environment with uvicorn, without Triolet. It does only what Triolet's server does for a token:
receive frames of many rows over ZeroMQ, decode ids to text, and write a chunk to each stream. No
leases, credit, heartbeats, stop strings or metrics.

`fastapi` is written as in its documentation: a model for the body, a StreamingResponse, a
dictionary per chunk. `starlette` does less: a plain route, with the constant parts of chunks
encoded once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import time
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HELLO, RESERVE, TOKENS, END = 1, 6, 16, 18
PLENTY: Final = 1 << 30
WAITING_TOKENS: Final = 4096
MODEL: Final = "demo"


class Source:
    """The workers, over ZeroMQ.

    Args:
      folder: directory of their sockets.
      workers: number of decode workers.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        zmq_asyncio, self._zmq = import_module("zmq.asyncio"), import_module("zmq")
        self._context = zmq_asyncio.Context()
        self._addresses = [f"ipc://{folder}/decode-{number}" for number in range(workers)]
        self._sockets: list[Any] = []
        self._streams: dict[bytes, asyncio.Queue[int]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect and send HELLO."""
        for address in self._addresses:
            epoch = secrets.randbits(63)
            raw = self._context.socket(self._zmq.DEALER)
            raw.setsockopt(self._zmq.IDENTITY, b"server:peer:%016x" % epoch)
            raw.connect(address)
            await raw.send(msgspec.msgpack.encode([HELLO, ["server", "peer", epoch], 1, 1, ""]))
            self._sockets.append(raw)
            self._tasks.append(asyncio.create_task(self._receive(raw)))

    async def begin(self, seed: int, max_tokens: int) -> tuple[bytes, asyncio.Queue[int]]:
        """Start a stream; return its id and the channel of its tokens."""
        request_id = secrets.token_bytes(16)
        queue = self._streams[request_id] = asyncio.Queue(WAITING_TOKENS)
        sampling = {"seed": seed, "max_tokens": max_tokens}
        prompt = bytes(4)
        frame = [RESERVE, request_id, 0, prompt, b"", sampling, 0, PLENTY, 600.0, []]
        await self._socket_of(seed).send(msgspec.msgpack.encode(frame))
        return request_id, queue

    async def end(self, request_id: bytes, seed: int) -> None:
        """Cancel a stream."""
        del self._streams[request_id]
        await self._socket_of(seed).send(msgspec.msgpack.encode([END, request_id, 0, "cancel"]))

    def _socket_of(self, seed: int) -> Any:  # noqa: ANN401 - not installed here
        return self._sockets[seed % len(self._sockets)]

    async def _receive(self, raw: Any) -> None:  # noqa: ANN401
        decode = msgspec.msgpack.Decoder().decode
        while True:
            frame = decode(await raw.recv())
            if frame[0] == TOKENS:
                for request_id, _, _, token_id, *_ in frame[2]:
                    queue = self._streams.get(request_id)
                    if queue is not None:
                        queue.put_nowait(token_id)


class ChatBody(BaseModel):
    """Body of a chat request."""

    messages: list[dict[str, str]]
    stream: bool
    seed: int
    max_tokens: int
    ignore_eos: bool = False


class Front:
    """State and decoding shared by both applications.

    Args:
      source: the workers.
      tokenizer: path of a tokenizer.json.
    """

    def __init__(self, source: Source, tokenizer: Path) -> None:
        self.source = source
        self._tokenizers = import_module("tokenizers")
        self._decoders = import_module("tokenizers.decoders")
        self._tokenizer = self._tokenizers.Tokenizer.from_file(str(tokenizer))

    @asynccontextmanager
    async def lifespan(self, _app: object) -> AsyncIterator[None]:
        """Connect before the first request."""
        await self.source.start()
        yield

    async def texts(self, body: ChatBody) -> AsyncIterator[str]:
        """Yield the text of each token."""
        self._tokenizer.encode(body.messages[0]["content"])
        request_id, queue = await self.source.begin(body.seed, body.max_tokens)
        stream = self._decoders.DecodeStream(skip_special_tokens=True)
        try:
            for _ in range(body.max_tokens):
                text = stream.step(self._tokenizer, await queue.get())
                if text is not None:
                    yield text
        finally:
            await self.source.end(request_id, body.seed)


def chunk_of(response_id: str, created: int, delta: dict[str, str]) -> dict[str, Any]:
    """Return one chunk in OpenAI's format."""
    return {
        "id": response_id,
        "object": "chat.completion.chunk",
        "created": created,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}],
    }


def fastapi_app(front: Front) -> Any:  # noqa: ANN401
    """Return the application in FastAPI."""
    fastapi = import_module("fastapi")
    streaming = import_module("fastapi.responses").StreamingResponse

    async def events(body: ChatBody) -> AsyncIterator[str]:
        response_id, created = f"chatcmpl-{secrets.token_hex(16)}", int(time.time())
        first = chunk_of(response_id, created, {"role": "assistant", "content": ""})
        yield f"data: {json.dumps(first)}\n\n"
        async for text in front.texts(body):
            yield f"data: {json.dumps(chunk_of(response_id, created, {'content': text}))}\n\n"
        yield "data: [DONE]\n\n"

    async def chat_completions(body: ChatBody) -> Any:  # noqa: ANN401
        return streaming(events(body), media_type="text/event-stream")

    app = fastapi.FastAPI(lifespan=front.lifespan)
    app.post("/v1/chat/completions")(chat_completions)
    return app


def starlette_app(front: Front) -> Any:  # noqa: ANN401
    """Return the application in Starlette."""
    applications = import_module("starlette.applications")
    routing = import_module("starlette.routing")
    streaming = import_module("starlette.responses").StreamingResponse

    async def events(body: ChatBody) -> AsyncIterator[bytes]:
        response_id, created = f"chatcmpl-{secrets.token_hex(16)}", int(time.time())
        whole = json.dumps(chunk_of(response_id, created, {"content": "@"}))
        before, _, after = whole.partition('"@"')
        head, tail = f"data: {before}".encode(), f"{after}\n\n".encode()
        yield head + b'""' + tail
        async for text in front.texts(body):
            yield head + json.dumps(text).encode() + tail
        yield b"data: [DONE]\n\n"

    async def chat_completions(request: Any) -> Any:  # noqa: ANN401
        body = ChatBody.model_validate_json(await request.body())
        return streaming(events(body), media_type="text/event-stream")

    route = routing.Route("/v1/chat/completions", chat_completions, methods=["POST"])
    return applications.Starlette(routes=[route], lifespan=front.lifespan)


APPS: Final = {"fastapi": fastapi_app, "starlette": starlette_app}


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("app", choices=sorted(APPS))
    parser.add_argument("http", choices=("h11", "httptools"))
    parser.add_argument("loop", choices=("asyncio", "uvloop"))
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("sockets", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    front = Front(Source(arguments.sockets, arguments.workers), arguments.tokenizer)
    import_module("uvicorn").run(
        APPS[arguments.app](front),
        host="127.0.0.1",
        port=arguments.port,
        http=arguments.http,
        loop=arguments.loop,
        log_level="warning",
        access_log=False,
    )


if __name__ == "__main__":
    main()

"""Locust users that chat over SSE or WebSocket and record the times of every stream.

Runs inside locust, where gevent has patched the sockets, and imports nothing of the product. For
each protocol, TTFT and ITL appear as additional statistics in locust's report.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import websocket
from locust import HttpUser, between, events, task
from locust.user.task import LOCUST_STATE_STOPPING

from .campaign.answers import ChatLines, ResponseMessages, StreamFailedError, read_stream
from .figures import StreamClock, StreamRecord
from .harness.prompts import Prompt, PromptMix

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from locust.env import Environment
    from requests import Response

TIMEOUT_S = 60.0
"""Read timeout of a stream, far longer than a working server's stall timeouts."""
THINKING_S = (0.0, 0.3)
"""Pause between two requests. It is short, to generate load."""

_user_numbers = count(1)
_records: list[StreamRecord] = []


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--streams-file", default="streams.json", help="file for a record per stream"
    )


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def _write_records(environment: Environment, **_: object) -> None:
    text = json.dumps([asdict(record) for record in _records])
    Path(vars(environment.parsed_options)["streams_file"]).write_text(text, encoding="utf-8")


def _report(environment: Environment, record: StreamRecord) -> None:
    """Store the record, and report its times as separate statistics. The report labels all figures
    as milliseconds, so tokens/s are only in the printed table (figures.py)."""
    _records.append(record)
    figures = {
        "TTFT": None if record.ttft_s is None else record.ttft_s * 1000,
        "ITL": None if record.itl_s is None else record.itl_s * 1000,
    }
    for name, figure in figures.items():
        if record.failure is None and figure is not None:
            _fire(environment, record.protocol, f"{record.protocol} {name}", figure, record.tokens)


def _fire(
    environment: Environment,
    kind: str,
    name: str,
    figure: float,
    tokens: int,
    failure: str | None = None,
) -> None:
    environment.events.request.fire(  # type: ignore[no-untyped-call]
        request_type=kind,
        name=name,
        response_time=figure,
        response_length=tokens,
        exception=None if failure is None else StreamFailedError(failure),
        context={},
    )


class ChatUser(HttpUser):
    """Base class of both kinds of users: random prompts and the model's name."""

    abstract = True
    wait_time = between(*THINKING_S)
    _has_asked = False
    _is_last = False

    def stop(self, force: bool = False) -> bool:
        """Stop after the running stream, or after the first one.

        Locust would kill a waiting user, and possibly one that has just started its next stream,
        which would go unnoticed.
        """
        if force:
            return bool(super().stop(force))
        self._is_last = True
        if self._has_asked:
            self._state = LOCUST_STATE_STOPPING
        return False

    def _note(self, record: StreamRecord) -> None:
        """Report a stream, and stop if it was the last one."""
        _report(self.environment, record)
        self._has_asked = True
        if self._is_last:
            self._state = LOCUST_STATE_STOPPING

    def on_start(self) -> None:
        """Look up the model's name."""
        self.prompts = PromptMix(next(_user_numbers))
        listed = self.client.get("/v1/models", timeout=TIMEOUT_S).json()
        self.model = str(listed["data"][0]["id"])


class ChatOverSSE(ChatUser):
    """Streams POST /v1/chat/completions."""

    @task
    def chat(self) -> None:
        """Send a request and read the whole answer."""
        prompt = self.prompts.draw()
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt.text}],
            "max_tokens": prompt.max_tokens,
            "seed": prompt.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s = perf_counter()
        clock = StreamClock(began_s)
        failure, tokens = None, 0
        with self.client.post(
            "/v1/chat/completions",
            json=body,
            stream=True,
            timeout=TIMEOUT_S,
            name=f"SSE {prompt.kind}",
            catch_response=True,
        ) as response:
            try:
                if response.status_code != 200:
                    raise StreamFailedError(_refusal(response))
                tokens = read_stream(response.iter_lines(), ChatLines(), clock.piece)
                response.success()
            except (StreamFailedError, OSError) as error:
                failure = getattr(error, "reason", str(error)) or type(error).__name__
                response.failure(failure)
            # Locust itself would stop timing at the headers.
            response.request_meta["response_time"] = (perf_counter() - began_s) * 1000
        self._note(clock.record("SSE", prompt.kind, tokens, failure))


class ChatOverWebSocket(ChatUser):
    """Sends one question after the other on a persistent WebSocket."""

    socket: websocket.WebSocket | None = None

    def on_stop(self) -> None:
        self._close()

    @task
    def chat(self) -> None:
        """Send a request and read the whole answer."""
        prompt = self.prompts.draw()
        began_s = perf_counter()
        clock = StreamClock(began_s)
        failure, tokens = None, 0
        try:
            socket = self._connected()
            clock = StreamClock(perf_counter())
            socket.send(json.dumps(_create(prompt, self.model)))
            tokens = read_stream(iter(socket.recv, ""), ResponseMessages(), clock.piece)
        except (StreamFailedError, websocket.WebSocketException, OSError) as error:
            failure = getattr(error, "reason", str(error)) or type(error).__name__
            self._close()  # remaining data belongs to the failed stream
        record = clock.record("WS", prompt.kind, tokens, failure)
        took_ms = (perf_counter() - began_s) * 1000
        _fire(self.environment, "WS", f"WS {prompt.kind}", took_ms, tokens, failure)
        self._note(record)

    def _connected(self) -> websocket.WebSocket:
        if self.socket is None:
            url = self.environment.host.replace("http", "ws", 1) + "/v1/responses"
            self.socket = websocket.create_connection(url, timeout=TIMEOUT_S)
        return self.socket

    def _close(self) -> None:
        if self.socket is not None:
            self.socket.close(timeout=1)
            self.socket = None


def _create(prompt: Prompt, model: str) -> dict[str, Any]:
    message = {"type": "message", "role": "user", "content": prompt.text}
    return {
        "type": "response.create",
        "model": model,
        "input": [message],
        "max_output_tokens": prompt.max_tokens,
        "seed": prompt.seed,
        "store": False,
    }


def _refusal(response: Response) -> str:
    """Return a description of a failed answer: status and error code, or the connection error."""
    try:
        code = response.json()["error"]["code"]
    except (ValueError, LookupError, TypeError):
        code = "without an error object"
    return f"status {response.status_code}, {code}"

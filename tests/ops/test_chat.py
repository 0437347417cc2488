"""Tests of `triolet chat` against a scripted server over a real socket."""

from __future__ import annotations

import io
import json
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from rich.console import Console

from ops.cli import main
from ops.cli.chat import Conversation, _show_answer, run_chat, summary
from ops.cli.chat_client import AnswerFailed, AnswerTimes, ChatClient
from ops.exit_codes import CommandFailed
from tests.threaded import running_server

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 60.0
Script: TypeAlias = list[str] | tuple[int, str]


def chunk(text: str = "", finish: str | None = None, **more: object) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return json.dumps({"choices": [choice], **more})


USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
TOO_LONG = json.dumps({"error": {"message": "too long", "code": "context_length_exceeded"}})


class FakeServer(ThreadingHTTPServer):
    """A server that answers each request with the next script: SSE payloads, or status and body."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.scripts: list[Script] = []
        self.questions: list[dict[str, Any]] = []
        self.models = '{"data": [{"id": "tiny"}]}'
        self.models_status = 200
        self.hangs = threading.Event()
        self.saw_client_leave = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._send(self.server.models_status, self.server.models)

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        self.server.questions.append(json.loads(self.rfile.read(length)))
        script = self.server.scripts.pop(0)
        if isinstance(script, tuple):
            self._send(*script)
            return
        self._send(200, "".join(f": keep-alive\n\ndata: {data}\n\n" for data in script), ends=False)
        if self.server.hangs.is_set():
            assert self.connection.recv(1) == b""
            self.server.saw_client_leave.set()

    def _send(self, status: int, body: str, *, ends: bool = True) -> None:
        self.send_response(status)
        if ends:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running_server(FakeServer()) as fake:
        yield fake


@pytest.fixture
def conversation(server: FakeServer) -> Iterator[Conversation]:
    with closing(ChatClient(server.url, {"temperature": 0.5})) as client:
        yield Conversation(client, client.model_name())


def ask(conversation: Conversation, question: str, times: AnswerTimes | None = None) -> str:
    return "".join(conversation.ask(question, times or AnswerTimes(time.monotonic())))


def test_an_answer_comes_in_pieces_with_its_counts(
    server: FakeServer, conversation: Conversation
) -> None:
    server.scripts.append([chunk("Hel"), chunk("lo"), chunk(finish="stop"), USAGE, "[DONE]"])
    times = AnswerTimes(time.monotonic())
    assert list(conversation.ask("Hi", times)) == ["Hel", "lo"]
    assert times.tokens == 3
    assert times.finish_reason == "stop"
    assert times.ttft_s is not None
    assert times.tokens_per_s is not None
    (question,) = server.questions
    assert question["model"] == "tiny"
    assert question["stream"] is True
    assert question["temperature"] == 0.5


def thinking(*thoughts: str) -> list[str]:
    """Return chunks of reasoning."""
    deltas = ({"reasoning_content": thought} for thought in thoughts)
    return [json.dumps({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]


def test_reasoning_is_folded_away_and_sent_with_the_conversation(
    server: FakeServer,
    conversation: Conversation,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = [*thinking("Is it", "?"), chunk("It is."), "[DONE]"]
    server.scripts += [script, script, script]
    shown = Console(file=io.StringIO(), highlight=False, width=80)
    _show_answer(shown, conversation, "1")
    assert isinstance(shown.file, io.StringIO)
    assert shown.file.getvalue().startswith("Thinking…\nIt is.\n")
    ask(conversation, "2")
    assert server.questions[-1]["messages"][1] == {
        "role": "assistant",
        "content": "It is.",
        "reasoning_content": "Is it?",
    }
    monkeypatch.setattr("sys.stdin", io.StringIO("3\n"))
    run_chat(server.url)
    assert capsys.readouterr().out == "It is.\n", "a pipe gets the answer"


def test_later_questions_carry_the_conversation_until_it_begins_anew(
    server: FakeServer, conversation: Conversation
) -> None:
    server.scripts += [[chunk(answer), "[DONE]"] for answer in ("one", "two", "three")]
    ask(conversation, "1")
    ask(conversation, "2")
    conversation.begin_anew()
    ask(conversation, "3")
    contents = [[turn["content"] for turn in q["messages"]] for q in server.questions]
    assert contents == [["1"], ["1", "one", "2"], ["3"]]


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(
    server: FakeServer, conversation: Conversation
) -> None:
    server.scripts += [[chunk("one"), "[DONE]"], (400, TOO_LONG), [chunk("two"), "[DONE]"]]
    ask(conversation, "1")
    assert ask(conversation, "2") == "two"
    assert conversation.num_forgotten == 1
    assert [turn["content"] for turn in server.questions[-1]["messages"]] == ["2"]


def test_a_question_that_is_itself_too_long_fails_and_leaves_no_trace(
    server: FakeServer, conversation: Conversation
) -> None:
    server.scripts += [(400, TOO_LONG), [chunk("fine"), "[DONE]"]]
    with pytest.raises(AnswerFailed, match="too long"):
        ask(conversation, "x" * 1000)
    ask(conversation, "short")
    assert [turn["content"] for turn in server.questions[-1]["messages"]] == ["short"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([chunk("ha"), '{"error": {"message": "worker\\nlost", "code": "x"}}'], "worker lost"),
        ([chunk("ha")], "closed the stream in the middle"),
        (["{"], "an invalid chunk of an answer"),
        (["{}"], "an invalid chunk of an answer"),
        (['{"choices": [7]}'], "an invalid chunk of an answer"),
        ((503, '{"error": {"message": "overloaded", "code": "overloaded"}}'), "overloaded"),
        ((502, "<html>"), "status 502"),
    ],
)
def test_a_failed_answer_says_why(
    server: FakeServer, conversation: Conversation, script: Script, words: str
) -> None:
    server.scripts.append(script)
    with pytest.raises(CommandFailed, match=words):
        ask(conversation, "Hi")


def test_stopping_an_answer_closes_its_connection_and_keeps_what_came(
    server: FakeServer, conversation: Conversation
) -> None:
    server.hangs.set()
    server.scripts.append([chunk("Once")])
    with closing(conversation.ask("A story", AnswerTimes(time.monotonic()))) as pieces:
        assert next(pieces) == "Once"
    assert server.saw_client_leave.wait(PATIENCE_S)
    server.hangs.clear()
    server.scripts.append([chunk("on"), "[DONE]"])
    ask(conversation, "Go on")
    turns = [turn["content"] for turn in server.questions[-1]["messages"]]
    assert turns == ["A story", "Once", "Go on"]


@pytest.mark.parametrize("models", ["{}", '{"data": []}', "[]", "<html>"])
def test_something_else_than_a_server_is_recognised(server: FakeServer, models: str) -> None:
    server.models = models
    with (
        closing(ChatClient(server.url, {})) as client,
        pytest.raises(CommandFailed, match="is not a Triolet server"),
    ):
        client.model_name()


def test_each_line_of_a_pipe_is_answered(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts += [[chunk(answer), "[DONE]"] for answer in ("one", "two")]
    monkeypatch.setattr("sys.stdin", io.StringIO("1\n\n/new\n2\n/quit\n3\n"))
    run_chat(server.url, max_tokens=5)
    assert capsys.readouterr().out == "one\ntwo\n"
    assert [len(question["messages"]) for question in server.questions] == [1, 1]
    assert {question["max_tokens"] for question in server.questions} == {5}


def test_a_pipe_may_hold_bytes_that_are_no_text(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.scripts += [[chunk("one"), "[DONE]"]]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    run_chat(server.url)
    assert capsys.readouterr().out == "one\n"
    assert server.questions[0]["messages"][-1]["content"] == "caf\ufffd"


@pytest.mark.parametrize(
    ("times", "forgotten", "note", "text"),
    [
        (AnswerTimes(0.0), 0, "stopped", "stopped"),
        (
            AnswerTimes(1.0, 1.05, 2.05, 101, "length"),
            2,
            "",
            "first token 50 ms · 101 tokens · 100 tokens/s · cut at the maximum length · "
            "context full, oldest turns dropped: 2",
        ),
        (AnswerTimes(1.0, 1.5, 1.5, 1, "stop"), 0, "", "first token 500 ms · 1 token"),
    ],
)
def test_the_line_below_an_answer_says_what_it_cost(
    times: AnswerTimes, forgotten: int, note: str, text: str
) -> None:
    assert summary(times, forgotten, note) == text


@pytest.mark.parametrize(
    ("key", "message", "remedy"),
    [
        ("", "this server asks for an API key", "set the environment variable TRIOLET_API_KEY"),
        (
            "sk-old",
            "the API key that was sent is wrong",
            "check the key in the environment variable TRI",
        ),
    ],
)
def test_a_server_with_tenants_is_told_from_a_program_that_is_none(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, key: str, message: str, remedy: str
) -> None:
    monkeypatch.setenv("TRIOLET_API_KEY", key)
    server.models_status = 401
    server.models = json.dumps({"error": {"message": message, "code": "invalid_api_key"}})
    with pytest.raises(CommandFailed) as caught:
        run_chat(server.url)
    assert message in str(caught.value)
    assert remedy in str(caught.value)
    assert "--url" not in str(caught.value)
    server.models = "<html>"
    with pytest.raises(CommandFailed, match="is not a Triolet server"):
        run_chat(server.url)


def test_help_names_the_variable_that_holds_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--help"]) == 0
    assert "TRIOLET_API_KEY" in capsys.readouterr().out

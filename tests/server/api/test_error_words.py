"""Tests of error texts: each names its parameter, and none contains Python terms."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import pytest
import trio

from server.api.schemas import StrictModel, read_request
from server.routes import ROUTES
from server.text.template import ChatTemplate
from tests.server.support.surface import posted, requested, surface
from triolet.errors import RequestError

from .test_content_types import BODIES

if TYPE_CHECKING:
    from collections.abc import Iterable

PYTHON: Final = re.compile(
    r"\bb'|\bb\"|bytearray|<class|object at 0x|\bNone\b|\bTrue\b|\bFalse\b|NoneType|\w+Error\b"
    r"|' object'|pydantic|\btuple\b|\bdict\b|\bstr\b"
)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI: Final = {"role": "user", "content": "hi"}
WRONG: Final[tuple[Any, ...]] = (True, None, -1, 1e9, "x", [], [[]], [None], {}, {"a": [True]})


def kind_of(path: str) -> type[StrictModel]:
    """Return the request model of a route."""
    entries = [row.entry for row in ROUTES.rows if row.endpoint == f"POST {path}"]
    [body] = [entry.body for entry in entries if entry is not None]
    assert isinstance(body, type)
    assert issubclass(body, StrictModel)
    return body


def user(**part: object) -> list[dict[str, Any]]:
    """Return a turn with one part."""
    return [{"role": "user", "content": [part]}]


def field_names(kind: type[StrictModel]) -> list[str]:
    """Return the field names as clients write them."""
    return [info.alias or name for name, info in kind.model_fields.items()]


def is_told(message: str, subjects: Iterable[str]) -> bool:
    """Return whether a message names one of these and contains no Python terms."""
    return not PYTHON.search(message) and any(one in message for one in subjects)


@pytest.mark.parametrize("path", BODIES)
def test_every_wrong_value_is_told_with_its_field_and_in_json_s_words(path: str) -> None:
    kind = kind_of(path)
    seen, wrong = 0, []
    for name in (*field_names(kind), *kind.unsupported, "no_such"):
        for value in WRONG:
            try:
                read_request(kind, BODIES[path] | {name: value})
            except RequestError as error:
                seen += 1
                if not is_told(error.told, [name]):
                    wrong.append((name, value, error.told))
    assert seen
    assert not wrong


@pytest.mark.slow
async def test_what_is_refused_after_the_fields_are_read_is_told_with_its_field_too() -> None:
    seen, wrong = 0, []
    async with surface() as server:
        for path, fields in BODIES.items():
            for name in field_names(kind_of(path)):
                answer = await server.post(path, fields | {name: 1_000_000})
                if answer.status == 200:
                    continue
                error = answer.json["error"]
                message = error if isinstance(error, str) else error["message"]
                param = error.get("param") if isinstance(error, dict) else None
                seen += 1
                if not is_told(message, [param] if param else [name, *fields]):
                    wrong.append((path, name, message))
    assert seen
    assert not wrong


@pytest.mark.parametrize(
    ("path", "subject"),
    [
        ("/v1/nothing", "'/v1/nothing'"),
        ("/static/none.js", "'none.js'"),
        ("/v1/models/none", "'none'"),
    ],
)
async def test_what_is_not_there_is_named(path: str, subject: str) -> None:
    answer = await requested("GET", path)
    assert answer.status == 404
    assert subject in answer.error["message"]


PICTURE: Final = [{"type": "image_url", "image_url": {"url": "data:"}}]


@pytest.mark.parametrize(
    ("path", "fields", "advice"),
    [
        (CHAT, {"prediction": {"type": "content"}}, "leave it out"),
        (CHAT, {"modalities": ["text", "audio"]}, "convert the answer to speech"),
        (CHAT, {"audio": {"voice": "x"}}, "convert the answer to speech"),
        (CHAT, {"web_search_options": {}}, "offer a function in tools"),
        (CHAT, {"store": True}, "keep the answer yourself"),
        (CHAT, {"messages": [{"role": "user", "content": PICTURE}]}, "describe the image"),
        (CHAT, {"messages": user(type="input_audio")}, "send the transcript as a text part"),
        (CHAT, {"messages": user(type="file")}, "send its text as a text part"),
        (RESPONSES, {"background": True}, "/v1/batches"),
        (RESPONSES, {"conversation": "conv_1"}, "use previous_response_id"),
        (RESPONSES, {"input": user(type="input_image")}, "describe the image"),
        (RESPONSES, {"input": user(type="input_file")}, "send its text as a text part"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "offer a function"),
        (MESSAGES, {"container": "c"}, "offer a function in tools"),
        (MESSAGES, {"mcp_servers": [{"type": "url"}]}, "list their tools in tools"),
        (MESSAGES, {"messages": user(type="image")}, "describe the image"),
        (MESSAGES, {"messages": user(type="document")}, "send its text as a text part"),
        (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "offer a function"),
        ("/api/generate", {"images": ["a"]}, "describe them in prompt"),
        ("/api/chat", {"messages": [HI | {"images": ["a"]}]}, "describe them in content"),
    ],
)
def test_what_is_not_served_is_refused_with_what_to_do_instead(
    path: str, fields: dict[str, Any], advice: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read_request(kind_of(path), BODIES[path] | fields)
    assert "not supported by this server" in refused.value.told
    assert advice in refused.value.told


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/moderations", "ask a model to judge"),
        ("/v1/uploads/upload_1/parts", "POST /v1/files takes a whole file"),
        ("/v1/audio/speech", "speech is not supported"),
        ("/v1/audio/transcriptions", "speech is not supported"),
        ("/v1/images/generations", "images and videos are not"),
        ("/v1/fine_tuning/jobs", "MODEL:ADAPTER"),
        ("/v1/vector_stores", "POST /v1/embeddings"),
        ("/v1/assistants", "send all turns"),
        ("/v1/threads/thread_1/runs", "send all turns"),
        ("/v1/realtime/sessions", "over a WebSocket"),
        ("/v1/chat/completions/chatcmpl-1", "chat completions are not stored"),
        ("/v1/containers", "run them in your program"),
        ("/v1/organization/usage/completions", "/v1/usage"),
        ("/v1/v1/messages", "without /v1"),
        ("/v1/audiobooks", "the API is below /v1"),
    ],
)
async def test_a_path_of_a_client_that_is_not_served_says_what_to_use(
    path: str, advice: str
) -> None:
    answer = await posted(path, {})
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert f"there is nothing at '{path}'" in answer.error["message"]
    assert advice in answer.error["message"]


async def test_a_path_that_is_not_served_is_told_in_the_words_of_its_api() -> None:
    async with surface() as server:
        of_messages = await server.post("/v1/messages/batches", {"requests": []})
        of_ollama = await server.post("/api/blobs/sha256:0", {})
    assert (of_messages.status, of_messages.json["error"]["type"]) == (404, "not_found_error")
    assert "use /v1/batches" in of_messages.json["error"]["message"]
    assert of_ollama.status == 404
    assert "models cannot be uploaded" in of_ollama.json["error"]


async def test_a_broken_body_is_told_without_bytes() -> None:
    async with surface() as server, await server.connect() as client:
        head = "POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.send(head.encode() + b"zz\r\n")
        with trio.fail_after(60):
            answer = await client.answer()
    assert answer.status == 400
    assert answer.json["error"]["message"] == "the request is malformed: illegal chunk header"


@pytest.mark.parametrize(
    "source", ["{{ messages[0].none.none }}", "{{ 1 + '1' }}", "{{ messages[0] | tojson + 1 }}"]
)
def test_what_a_template_fails_at_is_told_without_python_s_names(source: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "Hi"}])
    assert "chat template cannot render" in caught.value.told
    assert not PYTHON.search(caught.value.told), caught.value.told


def test_an_error_names_its_field_once() -> None:
    def told(message: str, param: str | None) -> str:
        return RequestError(message, status=400, code="c", param=param).told

    assert told("is required", "n") == "n: is required"
    assert told("n must be an integer", "n") == "n must be an integer"
    assert told("none is there", "n") == "n: none is there"
    assert told("is wrong", None) == "is wrong"

"""Tests of accepted content types: programs may send JSON as any type, web pages only as one that
requires a CORS preflight."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from server.api.schemas import StrictModel
from server.routes import ROUTES
from tests.server.support.surface import surface

TURNS: Final = [{"role": "user", "content": "Hi"}]
BODIES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {"messages": TURNS},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": TURNS, "max_tokens": 8},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/rerank": {"query": "Hi", "documents": ["a"]},
    "/v2/rerank": {"query": "Hi", "documents": ["a"]},
    "/rerank": {"query": "Hi", "documents": ["a"]},
    "/v1/score": {"text_1": "Hi", "text_2": "a"},
    "/score": {"text_1": "Hi", "text_2": "a"},
    "/api/chat": {"model": "demo", "messages": TURNS, "stream": False},
    "/api/generate": {"model": "demo", "prompt": "Hi", "stream": False},
    "/api/embed": {"model": "demo", "input": "Hi"},
    "/api/embeddings": {"model": "demo", "prompt": "Hi"},
    "/api/show": {"model": "demo"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}
NOT_TESTED_HERE: Final = "/v1/batches"
"""Needs files; reads its body like the others."""
NAMES: Final = {
    "none": "",
    "curl's": "application/x-www-form-urlencoded",
    "LiteLLM's": "application/octet-stream",
    "older LiteLLM's": "text/plain; charset=utf-8",
    "another": "application/vnd.x+json",
    "nonsense": "json",
}
FOREIGN: Final = "https://evil.example"


def test_every_route_that_reads_json_is_here() -> None:
    reading = {
        route.path
        for route in ROUTES.rows
        if route.entry is not None
        and isinstance(route.entry.body, type)
        and issubclass(route.entry.body, StrictModel)
    }
    assert reading == BODIES.keys() | {NOT_TESTED_HERE}


@pytest.mark.parametrize("name", NAMES)
async def test_a_program_may_call_its_json_anything(name: str) -> None:
    async with surface() as server:
        for path, fields in BODIES.items():
            body = json.dumps(fields).encode()
            headers = {"Content-Type": NAMES[name]}
            answer = await server.request("POST", path, body=body, headers=headers)
            assert answer.status == 200, (path, answer.body)


@pytest.mark.parametrize("origin", ["http://127.0.0.1", "https://app.example"])
async def test_a_page_that_may_ask_may_call_its_json_anything(origin: str) -> None:
    async with surface(allow_origins=("https://app.example",)) as server:
        for path in ("/v1/chat/completions", "/api/chat", "/tokenize"):
            body = json.dumps(BODIES[path]).encode()
            headers = {"Content-Type": "text/plain", "Origin": origin}
            answer = await server.request("POST", path, body=body, headers=headers)
            assert answer.status == 200, (path, answer.body)


async def test_no_page_posts_across_sites_without_a_preflight() -> None:
    """A browser sends these types, or none, without a preflight."""
    async with surface(allow_origins=("https://app.example",)) as server:
        for path, fields in BODIES.items():
            body = json.dumps(fields).encode()
            for media in ("", "text/plain", "application/x-www-form-urlencoded"):
                for origin in (FOREIGN, "null"):
                    headers = {"Content-Type": media, "Origin": origin}
                    answer = await server.request("POST", path, body=body, headers=headers)
                    assert answer.status == 415, (path, media, origin)
                    assert b"content-type: application/json" in answer.body
                    assert origin.encode() in answer.body
            asked_first = await server.request("POST", path, body=body, headers={"Origin": FOREIGN})
            assert asked_first.status == 403
        assert not server.fleet.generations


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 415), ("same-site", 415), ("same-origin", 200), ("none", 200)],
)
async def test_a_browser_that_hides_the_origin_of_a_page_is_asked_for_its_site(
    site: str, status: int
) -> None:
    async with surface() as server:
        headers = {"Content-Type": "text/plain", "Sec-Fetch-Site": site}
        answer = await server.request(
            "POST", "/tokenize", body=b'{"prompt": "Hi"}', headers=headers
        )
    assert answer.status == status


async def test_a_form_of_several_parts_is_no_json() -> None:
    async with surface() as server:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        answer = await server.request("POST", "/v1/completions", body=b"{}", headers=headers)
    assert answer.status == 415
    assert "'/v1/completions' takes JSON" in answer.error["message"]
    assert "'multipart/form-data'" in answer.error["message"]


async def test_what_no_utf_8_reader_can_take_is_named() -> None:
    async with surface() as server:
        for header, value in (
            ("Content-Type", "application/json; charset=utf-16"),
            ("Content-Encoding", "gzip"),
        ):
            answer = await server.post("/tokenize", {"prompt": "Hi"}, headers={header: value})
            assert answer.status == 415
            assert header.lower() in answer.error["message"]
            assert value.rpartition("=")[2] in answer.error["message"]

"""Tests that the OpenAPI document and the server agree."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import trio
from schemathesis.checks import not_a_server_error

from server.app import build_app
from server.document.conditions import up_to
from server.document.openapi import PATH
from server.routes import ROUTES
from tests.server.support.fakes import FakeText
from tests.server.support.surface import surface
from tests.server.support.tenants import tenancy_of

from .document import EXAMPLES, ask_all

if TYPE_CHECKING:
    from tests.server.support.surface import Surface

FEW_EXAMPLES: Final = 2
"""The simplest request of each kind per operation, and one more."""
OPENAI: Final = Path(__file__).parents[3] / "shared/data/vectors/openai-chat-subset.openapi.json"


class AnyText(FakeText):
    """Accepts every text, as real tokenizers do."""

    async def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        return tuple(text.encode()[:max_tokens])


def is_json(context: Any, response: Any, case: Any) -> None:  # noqa: ANN401
    """Check that an error has OpenAI's form."""
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


async def document_of(server: Surface) -> dict[str, Any]:
    answer = await server.request("GET", PATH)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    document: dict[str, Any] = answer.json
    return document


async def test_every_route_has_a_row_and_every_row_a_route() -> None:
    async with surface() as server:
        app = build_app(server.services)
    rows = [(row.endpoint, row.path) for row in ROUTES.rows]
    assert [(rule.endpoint, rule.rule) for rule in app.url_map.iter_rules()] == rows
    assert app.view_functions.keys() == dict(rows).keys()
    assert len(rows) == len(dict(rows))


@pytest.mark.proof
@pytest.mark.long
@pytest.mark.slow
async def test_the_server_is_as_its_document_says(whole: bool) -> None:
    examples = EXAMPLES if whole else FEW_EXAMPLES
    async with surface(text=AnyText()) as server:
        document = await document_of(server)
        ask = partial(ask_all, document, server.url, examples=examples)
        tally = await trio.to_thread.run_sync(ask)
    assert len(tally.asked) == sum(row.entry is not None for row in ROUTES.rows)
    assert not tally.faults
    assert not tally.refused


async def test_the_document_names_the_key_where_there_is_one() -> None:
    async with surface() as server:
        assert "security" not in await document_of(server)
    async with surface(tenancy=tenancy_of(alice="x")) as server:
        assert (await document_of(server))["security"] == [{"key": []}]


@pytest.mark.slow
@pytest.mark.skipif(
    not OPENAI.exists(), reason="OpenAI's document is missing beside the repository"
)
async def test_requests_by_openai_s_own_document_are_no_fault_of_ours() -> None:
    """They may ask for more than this server supports; the refusal must have OpenAI's form."""
    document = json.loads(OPENAI.read_text())
    async with surface() as server:
        checks = [not_a_server_error, is_json]
        tally = await trio.to_thread.run_sync(ask_all, document, server.url + "/v1", checks)
    assert len(tally.asked) == 4
    assert not tally.faults


async def test_the_document_has_the_bounds_of_its_server() -> None:
    async with surface(max_choices=3, max_prompts=2, model_aliases=("other",)) as server:
        schemas = (await document_of(server))["components"]["schemas"]
    chat, completion = schemas["ChatRequest"]["properties"], schemas["CompletionRequest"]
    assert chat["n"]["anyOf"][0]["maximum"] == 3
    assert chat["model"]["anyOf"][0]["enum"] == ["demo", "other"]
    assert chat["max_tokens"]["anyOf"][0]["maximum"] == 4095
    kinds = completion["properties"]["prompt"]["anyOf"]
    assert [one.get("maxItems") for one in kinds] == [None, 4095, 2, 2]
    assert schemas["DetokenizeRequest"]["properties"]["tokens"]["items"]["maximum"] == 255
    assert schemas["OllamaChat"]["properties"]["model"]["enum"][-1] == "other:latest"
    async with surface(model_aliases=("*",)) as server:
        schemas = (await document_of(server))["components"]["schemas"]
    assert "enum" not in schemas["ChatRequest"]["properties"]["model"]["anyOf"][0]


@pytest.mark.parametrize("most", [1, 7, 9, 10, 30, 255, 720, 1000, 2047])
def test_an_expression_for_numbers_takes_those_up_to_its_bound(most: int) -> None:
    expression = re.compile(up_to(most))
    taken = {number for number in range(most * 11) if expression.fullmatch(str(number))}
    assert taken == set(range(1, most + 1))
    assert not expression.fullmatch("01")

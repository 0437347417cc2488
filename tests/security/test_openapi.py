"""The OpenAPI document says what is served, and the server does what the document says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import schemathesis
import trio
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server.api.app import build_app
from server.api.openapi import OPERATIONS, PATH
from tests.server.support.surface import surface
from tests.server.support.tenants import tenancy_of

if TYPE_CHECKING:
    from tests.server.support.surface import Surface

OPENAI: Final = Path(__file__).parents[3] / "shared/data/vectors/openai-chat-subset.openapi.json"
EXAMPLES: Final = 5
CHECKS: Final = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
BOUNDED: Final = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
MODES: Final = list(schemathesis.GenerationMode)


def is_json(context: Any, response: Any, case: Any) -> None:  # noqa: ANN401
    """Check that an error is one, in OpenAI's form."""
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def ask_all(document: dict[str, Any], url: str, checks: list[Any] = CHECKS) -> list[str]:
    """Ask every operation of a document with what it allows and with what it does not.

    Returns:
      The operations that were asked.
    """
    asked = []
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        for mode in MODES:
            if mode.is_negative and not operation.body:
                continue  # any path is a string
            strategy = operation.as_strategy(generation_mode=mode)

            @BOUNDED
            @given(case=strategy)
            def ask(case: Any) -> None:  # noqa: ANN401
                response = case.call(base_url=url, timeout=60)
                case.validate_response(response, checks=checks)

            ask()
        asked.append(operation.label)
    return asked


async def document_of(server: Surface) -> dict[str, Any]:
    answer = await server.request("GET", PATH)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    document: dict[str, Any] = answer.json
    return document


async def test_every_route_has_a_row_and_every_row_a_route() -> None:
    async with surface() as server:
        rules = build_app(server.services).url_map.iter_rules()
        assert {rule.endpoint for rule in rules if not rule.websocket} == set(OPERATIONS)


@pytest.mark.slow
async def test_the_server_is_as_its_document_says() -> None:
    async with surface() as server:
        document = await document_of(server)
        asked = await trio.to_thread.run_sync(ask_all, document, server.url)
        assert len(asked) == len(OPERATIONS)


async def test_the_document_names_the_key_where_there_is_one() -> None:
    async with surface() as server:
        assert "security" not in await document_of(server)
    async with surface(tenancy=tenancy_of(alice="x")) as server:
        assert (await document_of(server))["security"] == [{"key": []}]


@pytest.mark.slow
@pytest.mark.skipif(not OPENAI.exists(), reason="OpenAI's document is not beside the repository")
async def test_requests_by_openai_s_own_document_are_no_fault_of_ours() -> None:
    """They may ask for more than is served here; then the refusal is an error in OpenAI's form."""
    document = json.loads(OPENAI.read_text())
    async with surface() as server:
        asked = await trio.to_thread.run_sync(
            partial(ask_all, document, server.url + "/v1", checks=[not_a_server_error, is_json])
        )
    assert len(asked) == 4

"""Tests of the OpenAPI document: fields are described, and bounds match the validators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from server.document.openapi import PATH
from server.routes import ROUTES
from tests.server.api.test_content_types import BODIES
from tests.server.support.surface import surface
from triolet.sampling import MAX_LOGIT_BIAS

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST: Final = 120
"""Maximum characters of a description: one line of the page."""
BESIDE: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": [1]},
    "/v1/chat/completions": {"logprobs": True},
    "/v1/responses": {"include": ["message.output_text.logprobs"]},
}
"""Other fields that a body needs before a field's bound is checked."""
RELATIONS: Final = ("context is", "exceeds max_tokens")
"""Errors about a field's relation to the prompt or to another field; the document states them in
prose."""


async def documented() -> dict[str, Any]:
    async with surface() as server:
        document: dict[str, Any] = (await server.request("GET", PATH)).json
    return document


def parts_of(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield schema
    yield from schema.get("anyOf", ())


def bodies_of(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each operation with the schema of its body."""
    components = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = content["schema"]
                name = schema.get("$ref", "").rpartition("/")[2]
                yield f"{method.upper()} {path}", components[name] if name else schema


def integers_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each field that may be an integer: its path, its name and that part of its schema."""
    for operation, schema in bodies_of(document):
        path = operation.split()[1]
        for name, field in schema["properties"].items() if path in BODIES else ():
            for part in parts_of(field):
                # The fake model's vectors have no size, so no length can be requested.
                if part.get("type") == "integer" and name != "dimensions":
                    yield path, name, part


async def test_every_field_of_every_body_is_described_in_one_line() -> None:
    bodies = dict(bodies_of(await documented()))
    assert len(bodies) == sum(
        row.entry is not None and row.entry.body is not None for row in ROUTES.rows
    )
    for operation, schema in bodies.items():
        for name, field in {**schema["properties"], **schema.get("x-triolet-more", {})}.items():
            text = field.get("description", "")
            assert text.endswith("."), (operation, name)
            assert len(text) <= LONGEST, (operation, name)
            assert "\n" not in text, (operation, name)


async def test_the_model_is_the_first_field_and_what_is_required_comes_next() -> None:
    for operation, schema in bodies_of(await documented()):
        names = list(schema["properties"])
        required = [name for name in schema.get("required", ()) if name != "model"]
        first = ["model"] if "model" in names else []
        assert names[: len(first) + len(required)] == first + required, operation


@pytest.mark.slow
async def test_the_bounds_of_integers_are_those_that_the_server_keeps() -> None:
    """At each bound a value is accepted or conflicts with another field; one beyond it is refused,
    and the error names the field."""
    tried, wrong = 0, []
    async with surface() as server:
        document = (await server.request("GET", PATH)).json
        for path, name, part in integers_of(document):
            least, most = part["minimum"], part["maximum"]
            own = BODIES[path] | BESIDE.get(path, {})
            for value in (least - 1, least, most, most + 1):
                answer = await server.post(path, own | {name: value})
                is_related = any(one in str(answer.body) for one in RELATIONS)
                if least <= value <= most:
                    is_right = answer.status == 200 or is_related
                else:
                    is_right = answer.status == 400 and (is_related or name in str(answer.body))
                if not is_right:
                    wrong.append((path, name, value, answer.body[:200]))
                tried += 1
    assert not wrong
    assert tried > 100


async def test_the_longest_completion_of_the_document_can_be_had() -> None:
    async with surface() as server:
        document = (await server.request("GET", PATH)).json
        fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
        [most] = [part["maximum"] for part in parts_of(fields["max_tokens"]) if "maximum" in part]
        for tokens, status in ((most, 200), (most + 1, 400)):
            body = {"prompt": [1], "max_tokens": tokens}
            assert (await server.post("/v1/completions", body)).status == status
    lengths = [
        (path, part["maximum"])
        for path, name, part in integers_of(document)
        if name in {"max_tokens", "max_completion_tokens", "max_output_tokens"}
    ]
    unbounded = {"/v1/responses/input_tokens", "/v1/messages"}  # ignored; cut to what fits
    ends = {most for path, most in lengths if path not in unbounded}
    assert ends == {most}


async def test_ids_and_biases_have_the_bounds_of_the_document() -> None:
    async with surface() as server:
        document = (await server.request("GET", PATH)).json
        fields = document["components"]["schemas"]["CompletionRequest"]["properties"]
        [ids] = [part for part in parts_of(fields["stop_token_ids"]) if part.get("type") == "array"]
        [bias] = [part for part in parts_of(fields["logit_bias"]) if part.get("type") == "object"]
        largest, most = ids["items"]["maximum"], ids["maxItems"]
        assert (ids["items"]["minimum"], bias["maxProperties"]) == (0, MAX_LOGIT_BIAS)
        [value] = bias["patternProperties"].values()
        many = {str(one): 0 for one in range(MAX_LOGIT_BIAS)}
        for name, given, is_taken in (
            ("stop_token_ids", [0, largest], True),
            ("stop_token_ids", [largest + 1], False),
            ("stop_token_ids", [-1], False),
            ("stop_token_ids", [1] * most, True),
            ("stop_token_ids", [1] * (most + 1), False),
            ("logit_bias", {str(largest): value["maximum"]}, True),
            ("logit_bias", {str(largest): value["minimum"]}, True),
            ("logit_bias", {str(largest): value["maximum"] + 1}, False),
            ("logit_bias", {str(largest): value["minimum"] - 1}, False),
            ("logit_bias", {str(largest + 1): 0}, False),
            ("logit_bias", many | {"1000": 0}, False),
        ):
            answer = await server.post("/v1/completions", {"prompt": [1], name: given})
            assert (answer.status == 200) == is_taken, (name, len(given), answer.body)

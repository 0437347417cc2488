"""Tests of structured output settings: each becomes one grammar, or an error that names the
parameter."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.support.surface import surface
from triolet.sampling import Grammar, GrammarKind

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
SCHEMA_TEXT = json.dumps(SCHEMA, ensure_ascii=False)
OF_SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(SCHEMA | {"additionalProperties": False}, ensure_ascii=False),
)
ANY_OBJECT = Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}')
YES_OR_NO = Grammar(GrammarKind.LARK, 'start: "yes" | "\\"no\\""')
DEEP: dict[str, Any] = {"type": "string"}
for _ in range(32):
    DEEP = {"items": DEEP}


def schema_format(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}


CLOSED_OBJECT = Grammar(
    GrammarKind.JSON_SCHEMA, '{"type": "object", "additionalProperties": false}'
)

ASKED: list[tuple[dict[str, object], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": schema_format(SCHEMA)}, OF_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, ANY_OBJECT),
    ({"response_format": schema_format({"type": "object"})}, CLOSED_OBJECT),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA_TEXT}}, OF_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
    ({"structured_outputs": {"choice": ["yes", '"no"']}}, YES_OR_NO),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
    ({"guided_choice": ["yes", '"no"']}, YES_OR_NO),
    ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
    ({"guided_regex": None, "response_format": None, "structured_outputs": None}, None),
]
REFUSED: list[tuple[str, dict[str, object]]] = [
    ("response_format", {"response_format": 5}),
    ("response_format.type", {"response_format": {"type": "xml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    (
        "response_format.json_schema.name",
        {"response_format": {"type": "json_schema", "json_schema": {}}},
    ),
    ("response_format.json_schema.schema", {"response_format": schema_format("a")}),
    ("response_format.json_schema.schema", {"response_format": schema_format(DEEP)}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs.xml", {"structured_outputs": {"xml": "a"}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "(" * 33}}),
    ("structured_outputs.regex", {"structured_outputs": {"json": {}, "regex": "a"}}),
    ("guided_regex", {"guided_regex": "é" * 8200}),
    ("guided_regex", {"guided_regex": ""}),
    ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
    ("guided_choice", {"guided_choice": []}),
    ("guided_choice", {"guided_choice": ["a", ""]}),
    ("guided_choice.1", {"guided_choice": ["a", 5]}),
    ("guided_grammar", {"guided_grammar": 5}),
    ("guided_json", {"guided_json": {"const": "refused"}}),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_way_to_ask_is_the_same_grammar(path: str) -> None:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "a"}
    async with surface() as server:
        for asked, grammar in ASKED:
            assert (await server.post(path, prompt | asked)).status == 200
            assert server.fleet.generations.pop().request.sampling.grammar == grammar


async def test_what_is_wrong_with_it_is_named_before_anything_runs() -> None:
    async with surface() as server:
        server.grammars.refused.add('{"const": "refused"}')
        for param, asked in REFUSED:
            answer = await server.post(CHAT, {"messages": HI} | asked)
            assert (answer.status, answer.error["param"]) == (400, param), asked
            assert len(answer.body) < 1000
        assert not server.fleet.generations


async def test_every_choice_has_the_grammar_and_a_seed_of_its_own() -> None:
    body = {"messages": HI, "guided_regex": "a+", "n": 3, "seed": 5}
    async with surface() as server:
        assert (await server.post(CHAT, body)).status == 200
        sampling = [g.request.sampling for g in server.fleet.generations]
    assert {s.grammar for s in sampling} == {Grammar(GrammarKind.REGEX, "a+")}
    assert [s.seed for s in sampling] == [5, 6, 7]

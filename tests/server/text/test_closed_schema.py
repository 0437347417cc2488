"""Tests of closing a JSON schema: the result allows no unlisted key, and every value that it allows
is valid for the original."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from loadtest.schemas import random_schema
from server.text.closed_schema import MAX_CHAIN, closed, closed_text
from triolet.config import GrammarConfig
from triolet.grammar import build_tokenizer, compile_grammar
from triolet.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLTokenizer

DEMO = Path(__file__).parents[3] / "triolet" / "demo"
A: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
}
B: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "integer"}},
    "required": ["b"],
}
OPTIONAL: dict[str, Any] = {"properties": {"a": {}, "b": {}}}
BOTH = {"allOf": [{"$ref": "#/$defs/A"}, B]}


def tagged(kind: str, key: str) -> dict[str, Any]:
    """Return an object of a kind, with one additional key."""
    return {
        "type": "object",
        "properties": {"kind": {"type": "string", "const": kind}, key: {"type": "integer"}},
        "required": ["kind"],
    }


CLOSED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "plain": (A, ['{"a":1}'], ['{"a":1,"x":2}']),
    "no type": ({"properties": {"a": {}}}, ['{"a":1}', "5"], ['{"x":1}']),
    "or null": (A | {"type": ["object", "null"]}, ['{"a":1}', "null"], ['{"a":1,"x":1}']),
    "no keys": ({"type": "object", "properties": {}}, ["{}"], ['{"x":1}']),
    "required only": ({"type": "object", "required": ["a"]}, ['{"a":"b"}'], ['{"a":1,"x":1}']),
    "in an array": ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"a":1,"x":1}]']),
    "in a tuple": ({"type": "array", "prefixItems": [A]}, ['[{"a":1}]'], ['[{"a":1,"x":1}]']),
    "in a property": ({"properties": {"v": A}}, ['{"v":{"a":1}}'], ['{"v":{"a":1,"x":1}}']),
    "in additional properties": (
        {"type": "object", "additionalProperties": A},
        ['{"v":{"a":1}}'],
        ['{"v":{"a":1,"x":1}}'],
    ),
    "patterns": (
        {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {}}},
        ['{"a":1,"x1":2}'],
        ['{"a":1,"y":2}'],
    ),
    "allOf": ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1,"b":2,"x":3}']),
    "allOf with patterns": (
        {"allOf": [A, {"patternProperties": {"^x": {}}}]},
        ['{"a":1,"x1":2}'],
        ['{"a":1,"y":2}'],
    ),
    "allOf of one": (
        {"definitions": {"A": A}, "properties": {"v": {"allOf": [{"$ref": "#/definitions/A"}]}}},
        ['{"v":{"a":1}}'],
        ['{"v":{"a":1,"x":1}}'],
    ),
    "a part that is a value elsewhere": (
        {"$defs": {"A": A, "part-0": {}}, "properties": {"v": {"$ref": "#/$defs/A"}, "w": BOTH}},
        ['{"v":{"a":1},"w":{"a":1,"b":2}}'],
        ['{"v":{"a":1,"b":2}}', '{"w":{"a":1,"b":2,"x":3}}'],
    ),
    "reference beside properties": (
        {"$defs": {"A": A}, "$ref": "#/$defs/A", **B},
        ['{"a":1,"b":2}'],
        ['{"a":1,"b":2,"x":3}'],
    ),
    "escaped reference": (
        {"$defs": {"a/b~c d": A}, "$ref": "#/$defs/a~1b~0c%20d"},
        ['{"a":1}'],
        ['{"a":1,"x":1}'],
    ),
    "anyOf": ({"anyOf": [A, B, {"type": "null"}]}, ['{"b":1}', "null"], ['{"a":1,"x":1}']),
    "anyOf beside properties": (
        {"properties": {"k": {"type": "string"}}, "required": ["k"], "anyOf": [A, B]},
        ['{"k":"","a":1}', '{"k":"","b":1}'],
        ['{"k":"","a":1,"b":"x"}', '{"k":"","a":1,"x":1}'],
    ),
    "anyOf of requirements": (
        OPTIONAL | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
        ['{"a":1,"x":1}'],
    ),
    "a branch that is open": (
        {"anyOf": [A, B | {"additionalProperties": True}]},
        ['{"b":1,"x":1}'],
        ['{"a":1,"x":1}'],
    ),
    "oneOf by a tag": (
        {"oneOf": [tagged("cat", "a"), tagged("dog", "b"), {"type": "null"}]},
        ['{"kind":"cat","a":1}', '{"kind":"dog","b":1}', "null"],
        ['{"kind":"cat","b":1}', '{"kind":"dog","b":1,"x":1}'],
    ),
    "recursive": (
        {"type": "object", "properties": {"v": {}, "next": {"$ref": "#"}}, "required": ["v"]},
        ['{"v":1,"next":{"v":1}}'],
        ['{"v":1,"next":{"v":1,"x":1}}'],
    ),
}
LEFT_OPEN: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "any value": {},
    "explicitly open": OPTIONAL | {"additionalProperties": True},
    "a schema for others": OPTIONAL | {"additionalProperties": {"type": "integer"}},
    "more keys than are listed": {"properties": {}, "minProperties": 1},
    "more keys than a pattern may match": {"patternProperties": {"^x$": {}}, "minProperties": 2},
    "arrays of one choice": {
        "oneOf": [
            {"type": "array", "items": A | {"properties": {"b": {}}}},
            {"type": "array", "items": A},
        ]
    },
    "a constant": {"const": {"x": 1}, "properties": {"a": {}}},
    "a negation": OPTIONAL | {"not": A},
    "a nested document": OPTIONAL | {"$defs": {"A": A | {"$id": "a"}}},
    "a reference by anchor": OPTIONAL | {"items": {"$ref": "#a"}},
    "a reference to nothing": OPTIONAL | {"items": {"$ref": "#/$defs/a"}},
    "a combination with itself": {"allOf": [{"$ref": "#"}, A]},
    "keywords of a wrong type": OPTIONAL | {"allOf": 5},
    "a longer chain": {
        "$defs": {
            f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, A]} for i in range(MAX_CHAIN + 1)
        }
        | {f"d{MAX_CHAIN + 1}": A},
        "allOf": [{"$ref": "#/$defs/d0"}, B],
    },
    "too many steps": {
        "properties": {f"k{i}": {} for i in range(600)},
        "anyOf": [{"required": ["a"]}] * 300,
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return build_tokenizer((DEMO / "tokenizer.json").read_text(encoding="utf-8"), (1,))


def takes(tokenizer: LLTokenizer, schema: dict[str, Any], text: str) -> bool:
    """Return whether a text is a complete completion under a schema."""
    matcher = compile_grammar(tokenizer, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", CLOSED)
def test_no_key_is_invented(tokenizer: LLTokenizer, name: str) -> None:
    schema, good, bad = CLOSED[name]
    before = json.dumps(schema)
    narrower = closed(schema)
    assert json.dumps(schema) == before
    for text in good:
        assert takes(tokenizer, narrower, text), text
        jsonschema.validate(json.loads(text), schema)
    for text in bad:
        assert takes(tokenizer, schema, text), text
        assert not takes(tokenizer, narrower, text), text


@pytest.mark.parametrize("name", LEFT_OPEN)
def test_what_is_said_or_not_understood_stays_as_it_is(name: str) -> None:
    schema = LEFT_OPEN[name]
    text = json.dumps(schema)
    assert len(text) <= GrammarConfig().max_bytes
    assert closed(schema) == schema
    assert closed_text(text) is text


def test_branches_that_share_values_stay_open_together() -> None:
    # Both accept {"a": 1, "b": 2}, so oneOf refuses it; if only the first were closed, it would
    # not.
    shared = [{**A, "required": ["a", "b"]}, A]
    assert closed({"oneOf": shared}) == {
        "oneOf": shared,
        "properties": {"a": {}, "b": {}},
        "additionalProperties": False,
    }


def test_branches_with_tags_are_closed_whether_or_not_they_name_their_type() -> None:
    inner = {"type": "object", "properties": {"a": {}}}
    branches = [
        {"properties": {"k": {"const": word}, "v": inner}, "required": ["k"]} for word in "xy"
    ]
    for branch in closed({"oneOf": branches})["oneOf"]:
        assert branch["additionalProperties"] is False
        assert branch["properties"]["v"]["additionalProperties"] is False
    of_arrays = {"oneOf": [branch | {"items": inner} for branch in branches]}
    assert closed(of_arrays)["oneOf"] == of_arrays["oneOf"]


def test_long_lists_of_required_keys_are_steps_too() -> None:
    shared = {"properties": {f"p{n}": {} for n in range(560)}, "required": [0] * 1700}
    several = {f"q{n}": {"oneOf": [{"$ref": "#/b"}]} for n in range(150)}
    schema = {"b": shared, "type": "object", "properties": several}
    assert closed(schema) == schema


def test_what_is_in_branches_that_share_values_stays_open() -> None:
    # Both accept {"v": {"a": 1, "x": 1}}, so oneOf refuses it; with the first closed it would not.
    of_v = [{"properties": {"v": A}, "required": ["v"]}, {"required": ["v"]}]
    around = {"properties": {"v": {}}, "additionalProperties": False}
    assert closed({"oneOf": of_v}) == {"oneOf": of_v, **around}
    inner = {"anyOf": [{"items": {"oneOf": of_v}}, A]}
    assert closed(inner)["anyOf"][0]["items"]["oneOf"] == of_v


def test_what_branches_that_share_values_refer_to_is_copied_as_it_is() -> None:
    schema = {
        "$defs": {"A": A, "B": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}}},
        "properties": {
            "w": {"$ref": "#/$defs/A"},
            "v": {"oneOf": [{"$ref": "#/$defs/B"}, {"type": "object", "required": ["a"]}]},
        },
    }
    narrower = closed(schema)
    first, second = narrower["properties"]["v"]["oneOf"]
    assert second == {"type": "object", "required": ["a"]}
    copy = narrower["$defs"][first["$ref"].removeprefix("#/$defs/")]
    assert "additionalProperties" not in copy
    inner = narrower["$defs"][copy["properties"]["a"]["$ref"].removeprefix("#/$defs/")]
    assert inner == A
    assert narrower["$defs"]["A"] == A | {"additionalProperties": False}
    jsonschema.Draft202012Validator.check_schema(narrower)
    for value in ({"v": {"a": 1}}, {"v": {"a": {"a": 1, "x": 1}}}, {"w": {"a": 1, "x": 2}}):
        if jsonschema.Draft202012Validator(narrower).is_valid(value):
            jsonschema.validate(value, schema)


def any_schema(chance: random.Random, depth: int, names: Sequence[str]) -> dict[str, Any]:
    """Return a schema of objects, arrays and choices that may refer to definitions."""
    if depth == 0 or chance.random() < 0.15:
        simple = [{"type": "integer"}, {}, {"const": "x"}]
        return chance.choice(simple + [{"$ref": f"#/$defs/{name}"} for name in names])

    def some(count: int) -> list[dict[str, Any]]:
        return [any_schema(chance, depth - 1, names) for _ in range(count)]

    if (kind := chance.random()) < 0.1:
        return {"type": "array", "items": some(1)[0]}
    if kind < 0.5:
        return {chance.choice(["oneOf", "oneOf", "anyOf", "allOf"]): some(2)}
    node: dict[str, Any] = {"type": "object"} if chance.random() < 0.7 else {}
    node["properties"] = dict(zip(chance.choice(["ab", "b", "ak"]), some(2), strict=False))
    if chance.random() < 0.4:
        node["required"] = [chance.choice("abk")]
    if chance.random() < 0.2:
        node |= {"patternProperties": {"^p": {}}, "minProperties": chance.randint(1, 3)}
    return node


def any_value(chance: random.Random, depth: int) -> object:
    if depth == 0 or (kind := chance.random()) < 0.3:
        return chance.choice([1, "x"])
    if kind < 0.4:
        return [any_value(chance, depth - 1)]
    return {key: any_value(chance, depth - 1) for key in "abkpz" if chance.random() < 0.35}


def test_a_closed_schema_takes_nothing_that_the_schema_as_sent_refuses() -> None:
    chance = random.Random(6)
    for _ in range(250):
        definitions = {"D": any_schema(chance, 2, ("E",)), "E": any_schema(chance, 1, ())}
        schema = {"properties": {"a": any_schema(chance, 3, ("D", "E"))}, "$defs": definitions}
        sent, narrower = map(jsonschema.Draft202012Validator, (schema, closed(schema)))
        for value in [any_value(chance, 4) for _ in range(12)]:
            assert sent.is_valid(value) or not narrower.is_valid(value), (schema, value)


def test_strict_closes_objects_that_list_no_keys_and_heeds_what_is_said() -> None:
    free = {"type": "object"}
    assert closed(free, is_strict=True) == free | {"additionalProperties": False}
    said = {"type": "object", "additionalProperties": {"type": "integer"}}
    assert closed(said, is_strict=True) == said
    assert closed({}, is_strict=True) == {}


@pytest.mark.parametrize("text", ["{", "5", "[]", '"a"', "true"])
def test_a_text_that_is_no_object_is_the_compilers(text: str) -> None:
    assert closed_text(text) is text


def test_what_is_closed_already_is_the_same_text() -> None:
    for seed in range(20):
        text = json.dumps(random_schema(seed), ensure_ascii=False)
        assert closed_text(text) is text

"""Tests of the generator of JSON schemas: schemas depend only on the seed and are valid."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from loadtest.schemas import hostile, random_schema
from triolet.grammar import build_tokenizer, compile_grammar
from triolet.sampling import Grammar, GrammarKind

DEMO = Path(__file__).parents[2] / "triolet" / "demo"


@pytest.mark.slow
def test_every_schema_is_one_and_can_be_compiled() -> None:
    tokenizer = build_tokenizer((DEMO / "tokenizer.json").read_text(encoding="utf-8"), (1,))
    for seed in range(40):
        schema = random_schema(seed)
        assert schema == random_schema(seed)
        jsonschema.Draft202012Validator.check_schema(schema)
        compile_grammar(tokenizer, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    assert random_schema(1) != random_schema(2)


def test_hostile_ones_are_json_that_can_be_sent() -> None:
    assert all(json.loads(json.dumps(fields)) == fields for fields in hostile().values())

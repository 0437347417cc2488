"""Tests of compiling grammars: compilation is bounded, and an invalid grammar gets a one-line
error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loadtest.schemas import AMBIGUOUS
from triolet.grammar import GrammarError, build_tokenizer, compile_grammar
from triolet.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLTokenizer

DEMO = Path(__file__).parents[2] / "triolet" / "demo"


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return build_tokenizer((DEMO / "tokenizer.json").read_text(encoding="utf-8"), (1,))


def takes(tokenizer: LLTokenizer, grammar: Grammar, text: str) -> bool:
    """Return whether the grammar accepts a text as a beginning."""
    ids = tokenizer.tokenize_str(text)
    return compile_grammar(tokenizer, grammar).try_consume_tokens(ids) == len(ids)


def of_schema(schema: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, "(a"),
        Grammar(GrammarKind.LARK, "start: nothing"),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
        Grammar(GrammarKind.JSON_SCHEMA, "[" * 100_000),
        of_schema({"type": "objec"}),
        of_schema({"type": "array", "uniqueItems": True}),
        of_schema({"$ref": "http://127.0.0.1:9/schema"}),
        # Clients may not ask to ignore unsupported parts.
        of_schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
        of_schema(False),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(tokenizer: LLTokenizer, grammar: Grammar) -> None:
    with pytest.raises(GrammarError) as caught:
        compile_grammar(tokenizer, grammar)
    message = str(caught.value)
    assert 0 < len(message) <= 200
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ('{"a":1}', True),
        ('{ "a": 1 }', True),
        ('{  "a"', False),
        ('{\n"a"', False),
        ("\n{", False),
    ],
)
def test_json_may_have_blanks_but_not_be_all_blanks(
    tokenizer: LLTokenizer, text: str, is_taken: bool
) -> None:
    assert takes(tokenizer, of_schema({"type": "object"}), text) is is_taken


def test_a_regex_is_for_the_whole_completion(tokenizer: LLTokenizer) -> None:
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{2}")
    assert takes(tokenizer, grammar, "12")
    assert not takes(tokenizer, grammar, "a12")
    assert not takes(tokenizer, grammar, "123")


def test_a_tokenizer_of_an_unknown_kind_is_said_to_be_one() -> None:
    with pytest.raises(GrammarError, match="tokenizer cannot be used"):
        build_tokenizer("{}", (1,))


def test_an_ambiguous_grammar_ends_while_its_masks_are_cheap(tokenizer: LLTokenizer) -> None:
    matcher = compile_grammar(tokenizer, Grammar(GrammarKind.LARK, f"start: s\n{AMBIGUOUS}"))
    [token_id] = tokenizer.tokenize_str("a")
    num_tokens = 0
    while not matcher.is_error() and num_tokens < 40:
        matcher.compute_bitmask()
        num_tokens += matcher.consume_token(token_id)
    assert "Too many items" in matcher.get_error()
    assert num_tokens < 20

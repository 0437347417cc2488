"""From the constraint fields of a request to the one grammar that workers follow, within bounds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from triolet.errors import invalid_request
from triolet.sampling import Grammar, GrammarKind

from ..text.closed_schema import closed_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from triolet.config import GrammarConfig

    from .fields import ConstraintFields
    from .services import Services

ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_OPENING: Final = frozenset("([{")
_CLOSING: Final = frozenset(")]}")


async def read_grammar(fields: ConstraintFields, services: Services) -> Grammar | None:
    """Return the grammar that a request asks for, having had it compiled once.

    Raises:
      RequestError: 400 that names the field; 503 if too many grammars wait to be compiled.
    """
    wanted = list(_wanted(fields))
    if not wanted:
        return None
    if len(wanted) > 1:
        raise invalid_request(f"cannot be used together with {wanted[0][0]}", wanted[1][0])
    (param, grammar), config = wanted[0], services.config.grammar
    check_bounds(grammar, param, config)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        text = closed_text(grammar.text, is_strict=_is_strict(fields))
        grammar = Grammar(GrammarKind.JSON_SCHEMA, text)
    await services.grammars.check(grammar, param)
    return grammar


def _is_strict(fields: ConstraintFields) -> bool:
    """Return whether a schema is held to as OpenAI does: every object that it has is closed."""
    wanted = None if fields.response_format is None else fields.response_format.json_schema
    return wanted is not None and bool(wanted.strict) and wanted.schema_ is not None


def json_schema(schema: object) -> Grammar:
    """Return the grammar of what a schema describes."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def check_bounds(grammar: Grammar, param: str, config: GrammarConfig) -> None:
    """Refuse a grammar beyond the configured size or depth.

    Raises:
      RequestError: 400 that names `param`.
    """
    size = len(grammar.text.encode(errors="surrogatepass"))
    if size > config.max_bytes:
        raise invalid_request(f"has {size} bytes; at most {config.max_bytes} are allowed", param)
    if _depth(grammar.text) > config.max_depth:
        raise invalid_request(f"is nested more than {config.max_depth} deep", param)


def _wanted(fields: ConstraintFields) -> Iterator[tuple[str, Grammar]]:
    yield from _of_response_format(fields)
    outputs = fields.structured_outputs
    if outputs is not None:
        own = list(
            _of_vllm(
                "structured_outputs.",
                outputs.json_,
                outputs.regex,
                outputs.choice,
                outputs.grammar,
            )
        )
        if outputs.json_object:
            own.append(("structured_outputs.json_object", json_schema(ANY_OBJECT)))
        if not own:
            raise invalid_request(
                "needs one of json, regex, choice, grammar, json_object", "structured_outputs"
            )
        yield from own
    yield from _of_vllm(
        "guided_",
        fields.guided_json,
        fields.guided_regex,
        fields.guided_choice,
        fields.guided_grammar,
    )


def _of_response_format(fields: ConstraintFields) -> Iterator[tuple[str, Grammar]]:
    wanted = fields.response_format
    if wanted is None:
        return
    if wanted.type == "json_object":
        yield "response_format", json_schema(ANY_OBJECT)
    elif wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise invalid_request("is required with this type", "response_format.json_schema")
        schema = wanted.json_schema.schema_
        yield (
            "response_format.json_schema.schema",
            json_schema(ANY_OBJECT if schema is None else schema),
        )


def _of_vllm(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: Sequence[str] | None,
    lark: str | None,
) -> Iterator[tuple[str, Grammar]]:
    if schema is not None:
        yield f"{prefix}json", json_schema(schema)
    if regex is not None:
        yield f"{prefix}regex", Grammar(GrammarKind.REGEX, regex)
    if choice is not None:
        if not all(choice):
            raise invalid_request("may hold no empty string", f"{prefix}choice")
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)
        yield f"{prefix}choice", Grammar(GrammarKind.LARK, f"start: {options}")
    if lark is not None:
        yield f"{prefix}grammar", Grammar(GrammarKind.LARK, lark)


def _depth(text: str) -> int:
    """Return how deep brackets are nested. Those in strings count too, unless
    they are escaped."""
    depth = deepest = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING:
            depth = max(0, depth - 1)
    return deepest

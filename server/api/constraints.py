"""Builds the grammar that a completion must follow from a request's constraint fields and tools.

A grammar enforces required tool calls, so that they work with any model. Optional calls have a
grammar only for strict functions and for models that use the generic tool format; it applies from
the start of the call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import trio

from triolet.errors import RequestError, invalid_request
from triolet.sampling import MAX_GRAMMAR_CHARS, Grammar, GrammarKind

from ..text.closed_schema import closed, closed_text
from ..text.tool_forms.generic import ToolSupport
from ..text.tool_forms.repeats import OnceEach
from ..text.tool_forms.tool_calls import (
    CallRules,
    CallSchema,
    CallsRead,
    ToolForm,
    UnenforceableSchemaError,
)
from .fields import ConstraintFields, Function, NamedTool, ToolFields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from triolet.config import GrammarConfig

    from ..contract.generation import TextWatch
    from .schemas import ChatRequest
    from .served_models import ServedModel


ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
_OPENING: Final = frozenset("([{")
_CLOSING: Final = frozenset(")]}")


async def read_grammar(fields: ConstraintFields, model: ServedModel) -> Grammar | None:
    """Return the grammar of a request's constraint fields, after a test compilation.

    Raises:
      RequestError: 400 that names the field; 503 if too many grammars wait to be compiled.
    """
    wanted = list(_wanted(fields))
    if not wanted:
        return None
    if len(wanted) > 1:
        raise invalid_request(f"cannot be used together with {wanted[0][0]}", wanted[1][0])
    (param, grammar), config = wanted[0], model.config.grammar
    check_bounds(grammar, param, config)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        text = closed_text(grammar.text, is_strict=_is_strict(fields))
        grammar = Grammar(GrammarKind.JSON_SCHEMA, text)
    await model.grammars.check(grammar, param)
    return grammar


def asks_for_form(fields: ConstraintFields) -> bool:
    """Return whether a request constrains the format of its answer."""
    return any(True for _ in _wanted(fields))


def _is_strict(fields: ConstraintFields) -> bool:
    """Return whether a schema is strict, as in OpenAI's API: all of its objects are closed."""
    wanted = None if fields.response_format is None else fields.response_format.json_schema
    return wanted is not None and bool(wanted.strict) and wanted.schema_ is not None


def json_schema(schema: object) -> Grammar:
    """Return the grammar of a JSON Schema."""
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def check_bounds(grammar: Grammar, param: str, config: GrammarConfig) -> None:
    """Refuse a grammar above the configured size or depth.

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
            raise invalid_request("must not contain an empty string", f"{prefix}choice")
        options = " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)
        yield f"{prefix}choice", Grammar(GrammarKind.LARK, f"start: {options}")
    if lark is not None:
        yield f"{prefix}grammar", Grammar(GrammarKind.LARK, lark)


def _depth(text: str) -> int:
    """Return the nesting depth of brackets, including unescaped ones in strings."""
    depth = deepest = 0
    for character in text:
        if character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING:
            depth = max(0, depth - 1)
    return deepest


NO_ARGUMENTS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}
NOT_SHOWN: Final = (
    "are not shown to the model: its chat template ignores them, and generic tools are off or not "
    "possible. Start the server without --no-generic-tools (harmony models have no "
    "generic tools), use a model whose template shows tools, put such a chat_template.jinja into "
    "its directory, or require a call with tool_choice (required, or a tool's name)"
)


class ToolPlan(NamedTuple):
    """How a request's tools are used.

    Attributes:
      shown: tools passed to the chat template; None for none.
      form: the format of calls in the completion; None if it is only text.
      grammar: the grammar of the completion; None for unconstrained.
      watch: ends a completion that repeats its calls; None for none.
    """

    shown: list[dict[str, Any]] | None = None
    form: CallsRead | None = None
    grammar: Grammar | None = None
    watch: Callable[[], TextWatch] | None = None


async def plan_tools(fields: ChatRequest, model: ServedModel) -> ToolPlan:
    """Plan the use of a request's tools. Their grammar is test-compiled.

    Raises:
      RequestError: 400 that names the field; 503 if too many grammars wait to be compiled.
    """
    functions = [tool.function for tool in fields.tools or ()]
    choice = fields.tool_choice or "auto"
    if not functions:
        if choice not in ("none", "auto"):
            raise invalid_request("needs tools", "tool_choice")
        return ToolPlan()
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise invalid_request("has the same name twice", "tools")
    if choice == "none":
        return ToolPlan()
    # Without a chat template rendering fails anyway, with a clearer error.
    is_untold = model.text.tools is ToolSupport.NONE and model.text.has_chat_template
    if choice == "auto" and is_untold:
        raise invalid_request(NOT_SHOWN, "tools")
    form = model.text.tool_form.of_tools({f.name: f.parameters or {} for f in functions})
    grammar = await _grammar(fields, functions, form, model)
    if grammar is not None:
        await model.grammars.check(grammar, "tools")
    shown = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
    if choice == "auto" or _is_single(fields):
        return ToolPlan(shown, form, grammar)
    once = OnceEach(form)
    return ToolPlan(shown, once, grammar, once.watch)


def _is_single(fields: ToolFields) -> bool:
    """Whether at most one tool may be called."""
    return isinstance(fields.tool_choice, NamedTool) or fields.parallel_tool_calls is False


async def _grammar(
    fields: ChatRequest, functions: Sequence[Function], form: ToolForm, model: ServedModel
) -> Grammar | None:
    choice = fields.tool_choice or "auto"
    # Only one of the answer's format and the calls' format can be enforced. The client asked for
    # the first.
    is_generic = model.text.tools is ToolSupport.GENERIC and not asks_for_form(fields)
    is_free = choice == "auto" and not is_generic
    if is_free and not any(function.strict for function in functions):
        return None
    wanted: list[tuple[Function, dict[str, Any]]] = []
    num_chars = 0
    for index, function in enumerate(functions):
        if isinstance(choice, NamedTool) and function.name != choice.function.name:
            continue
        schema = _arguments(function, is_free=is_free)
        grammar = json_schema(schema)
        check_bounds(grammar, f"tools.{index}.function.parameters", model.config.grammar)
        num_chars += len(grammar.text)
        if num_chars > MAX_GRAMMAR_CHARS:
            raise _too_large()
        wanted.append((function, schema))
    tools: list[CallSchema] = []
    for function, schema in wanted:
        await trio.lowlevel.checkpoint()  # a schema of maximum size takes milliseconds
        is_strict = bool(function.strict)
        tools.append(CallSchema(function.name, closed(schema, is_strict=is_strict), is_strict))
    if not tools:
        raise invalid_request("names a tool that is not in tools", "tool_choice")
    demanded = CallRules(tools, choice != "auto", _is_single(fields), model.text.tool_tokens)
    try:
        rules = form.rules(demanded)
    except UnenforceableSchemaError as error:
        raise invalid_request(
            f"cannot be enforced in this model's tool call format: {error}; change the "
            "schema, or use tool_choice auto without strict",
            "tools",
        ) from None
    text = "\n".join(["%llguidance {}", *rules])
    if len(text) > MAX_GRAMMAR_CHARS:
        raise _too_large()
    return Grammar(GrammarKind.LARK, text)


def _too_large() -> RequestError:
    return invalid_request("are too large in total to be enforced", "tools")


def _arguments(function: Function, *, is_free: bool) -> dict[str, Any]:
    """Return the JSON Schema that a function's arguments must match."""
    if is_free and not function.strict:
        return ANY_ARGUMENTS
    return NO_ARGUMENTS if function.parameters is None else function.parameters

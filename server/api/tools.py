"""From the tools of a request to what its model reads, and to what it has to write.

Knows the request's fields and the form in which its model writes calls; refuses to compile. Where
tools have to be called a grammar sees to it, so that it works with any model; where they may be,
only strict functions have one, which begins with the call.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from triolet.errors import invalid_request
from triolet.sampling import JSON_WHITESPACE, MAX_GRAMMAR_CHARS, Grammar, GrammarKind

from ..text.closed_schema import closed
from .constraints import check_bounds, json_schema
from .json_body import holds_many_values
from .tool_schema import NamedTool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..text.tool_calls import ToolForm
    from .ports import Services
    from .tool_schema import Function, ToolFields

NO_ARGUMENTS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}
JSON_FORM: Final = {"whitespace_pattern": JSON_WHITESPACE}


class ToolPlan(NamedTuple):
    """What the tools of a request come to.

    Attributes:
      shown: what the chat template is given; None for nothing.
      form: how calls in the completion are written; None if it is only text.
      grammar: what the completion has to be, None for anything.
    """

    shown: list[dict[str, Any]] | None = None
    form: ToolForm | None = None
    grammar: Grammar | None = None


async def plan_tools(fields: ToolFields, services: Services) -> ToolPlan:
    """Return what the tools of a request come to; their grammar has been compiled once.

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
    form = services.text.tool_form
    grammar = _grammar(fields, functions, form, services)
    if grammar is not None:
        await services.grammars.check(grammar, "tools")
    shown = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
    return ToolPlan(shown, form, grammar)


def _grammar(
    fields: ToolFields, functions: Sequence[Function], form: ToolForm, services: Services
) -> Grammar | None:
    choice = fields.tool_choice or "auto"
    is_named = isinstance(choice, NamedTool)
    if choice == "auto" and not any(function.strict for function in functions):
        return None
    rules = []
    callable_ids = []
    for index, function in enumerate(functions):
        if isinstance(choice, NamedTool) and function.name != choice.function.name:
            continue
        callable_ids.append(index)
        schema = _arguments(function, is_free=choice == "auto")
        param = f"tools.{index}.function.parameters"
        check_bounds(json_schema(schema), param, services.config.grammar)
        head = json.dumps(f'{{"name": "{function.name}", "{form.arguments}": ')
        own = closed(schema, is_strict=bool(function.strict)) | {"x-guidance": JSON_FORM}
        rules.append(f'call_{index}: {head} %json {json.dumps(own, ensure_ascii=False)} "}}"')
    if not callable_ids:
        raise invalid_request("names a tool that is not among tools", "tool_choice")
    options = " | ".join(f"call_{index}" for index in callable_ids)
    is_single = is_named or fields.parallel_tool_calls is False
    start = _free(form, is_single) if choice == "auto" else _forced(form, is_single)
    text = "\n".join(["%llguidance {}", *start, f"body: {options}", *rules])
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid_request("are too large together to be enforced", "tools")
    return Grammar(GrammarKind.LARK, text)


def _arguments(function: Function, *, is_free: bool) -> dict[str, Any]:
    """Return the schema that a function's arguments are held to."""
    if is_free and not function.strict:
        return ANY_ARGUMENTS
    return NO_ARGUMENTS if function.parameters is None else function.parameters


def _forced(form: ToolForm, is_single: bool) -> list[str]:
    """Return the rules of a completion that is nothing but calls."""
    more = "" if is_single else f" ({json.dumps(form.between)} call)*"
    if not form.opening:
        return [f"start: call{more}", "call: body"]
    opening, closing = json.dumps(form.opening + "\n"), json.dumps("\n" + form.closing)
    return [f"start: call{more}", f"call: {opening} body {closing}"]


def _free(form: ToolForm, is_single: bool) -> list[str]:
    """Return the rules of a completion that may hold calls."""
    if not form.opening:
        more = "" if is_single else f" ({json.dumps(form.between)} body)*"
        return [f"start: TEXT | body{more}", r"TEXT: /([^{](.|\n)*)?/"]
    opening, closing = json.dumps(form.opening), json.dumps("\n" + form.closing)
    return [
        f"start: call{'?' if is_single else '*'} rest",
        "rest: TEXT",
        r"TEXT: /(.|\n)*/",
        f"opened[lazy]: TEXT {opening}",
        f'call: opened "\\n" body {closing}',
    ]


def parsed_arguments(text: str) -> object:
    """Return the arguments of an earlier call as templates want them: an object, if they are.

    They came in a string, which the bounds on a body do not look into.
    """
    try:
        value = text if holds_many_values(text.encode()) else json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text

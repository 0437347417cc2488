"""From the tools of a request to what its model reads, and to what it has to write.

Where
tools have to be called a grammar sees to it, so that it works with any model; where they may be,
only strict functions have one, which begins with the call, and the model's chat template has to
show them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from triolet.errors import invalid_request
from triolet.sampling import MAX_GRAMMAR_CHARS, Grammar, GrammarKind

from ...text.closed_schema import closed
from ...text.scanning import HALF_PAIR
from ...text.tool_calls import CallRules, CallSchema, ToolForm, UnenforceableSchemaError
from ...text.tool_forms.repeats import OnceEach
from ..body import holds_many_values
from ..constraints import check_bounds, json_schema
from ..fields import Function, NamedTool, ToolFields

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...contract.generation import TextWatch
    from ..services import Services

NO_ARGUMENTS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
ANY_ARGUMENTS: Final[dict[str, Any]] = {"type": "object"}
NOT_SHOWN: Final = (
    "are not shown to the model: its chat template ignores them. Use a model whose template shows "
    "tools, put a chat_template.jinja that does into its directory, or demand a call with "
    "tool_choice (required, or a tool's name), which needs no template"
)


class ToolPlan(NamedTuple):
    """What the tools of a request come to.

    Attributes:
      shown: what the chat template is given; None for nothing.
      form: how calls in the completion are written; None if it is only text.
      grammar: what the completion has to be, None for anything.
      watch: ends a completion that repeats its calls; None if nothing does.
    """

    shown: list[dict[str, Any]] | None = None
    form: ToolForm | None = None
    grammar: Grammar | None = None
    watch: Callable[[], TextWatch] | None = None


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
    if choice == "auto" and not await services.text.shows_tools():
        raise invalid_request(NOT_SHOWN, "tools")
    form = services.text.tool_form.of_tools({f.name: f.parameters or {} for f in functions})
    grammar = _grammar(fields, functions, form, services)
    if grammar is not None:
        await services.grammars.check(grammar, "tools")
    shown = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
    if choice == "auto" or _is_single(fields):
        return ToolPlan(shown, form, grammar)
    once = OnceEach(form)
    return ToolPlan(shown, once, grammar, once.watch)


def _is_single(fields: ToolFields) -> bool:
    """Whether at most one tool may be called."""
    return isinstance(fields.tool_choice, NamedTool) or fields.parallel_tool_calls is False


def _grammar(
    fields: ToolFields, functions: Sequence[Function], form: ToolForm, services: Services
) -> Grammar | None:
    choice = fields.tool_choice or "auto"
    if choice == "auto" and not any(function.strict for function in functions):
        return None
    tools: list[CallSchema] = []
    for index, function in enumerate(functions):
        if isinstance(choice, NamedTool) and function.name != choice.function.name:
            continue
        schema = _arguments(function, is_free=choice == "auto")
        param = f"tools.{index}.function.parameters"
        check_bounds(json_schema(schema), param, services.config.grammar)
        is_strict = bool(function.strict)
        tools.append(CallSchema(function.name, closed(schema, is_strict=is_strict), is_strict))
    if not tools:
        raise invalid_request("names a tool that is not among tools", "tool_choice")
    demanded = CallRules(tools, choice != "auto", _is_single(fields), services.text.tool_tokens)
    try:
        rules = form.rules(demanded)
    except UnenforceableSchemaError as error:
        raise invalid_request(
            f"cannot be enforced in the form in which this model calls tools: {error}; change the "
            "schema, or leave the function to the model with tool_choice auto and without strict",
            "tools",
        ) from None
    text = "\n".join(["%llguidance {}", *rules])
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid_request("are too large together to be enforced", "tools")
    return Grammar(GrammarKind.LARK, text)


def _arguments(function: Function, *, is_free: bool) -> dict[str, Any]:
    """Return the schema that a function's arguments are held to."""
    if is_free and not function.strict:
        return ANY_ARGUMENTS
    return NO_ARGUMENTS if function.parameters is None else function.parameters


def parsed_arguments(text: str) -> object:
    """Return the arguments of an earlier call as templates want them: an object, if they are.

    They came in a string, which the bounds on a body do not look into.
    """
    try:
        value = text if holds_many_values(text.encode()) else json.loads(text)
        if isinstance(value, dict) and HALF_PAIR.search(
            again := json.dumps(value, ensure_ascii=False)
        ):
            value = json.loads(HALF_PAIR.sub("\ufffd", again))  # it has no UTF-8
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text

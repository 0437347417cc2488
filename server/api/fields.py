"""Request fields shared by several endpoints, for validation and the OpenAPI document, and the
error texts of failed validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import TypedDict

from triolet.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MIN_PENALTY

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pydantic_core import ErrorDetails


MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 64
MAX_INT: Final = 2**31 - 1


MAX_METADATA: Final = 16
Metadata: TypeAlias = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=MAX_METADATA),
]
"""Key-value pairs that a client attaches to a request; returned unchanged."""


class TextPart(TypedDict):
    """A part of a message's content."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]

    type: Literal["text", "input_text", "output_text"]
    text: str


ServiceTier: TypeAlias = Literal["auto", "default", "flex", "priority", "scale"]
"""OpenAI's service tiers. Those without a class here use the plan's default."""
Content: TypeAlias = str | list[TextPart]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = (
    _StopString | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)] | None
)
Penalty: TypeAlias = Annotated[float, Field(ge=MIN_PENALTY, le=10)] | None
_Bias = Annotated[float, Field(ge=-100, le=100)]
_IdAsKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
LogitBias: TypeAlias = Annotated[dict[_IdAsKey, _Bias], Field(max_length=MAX_LOGIT_BIAS)] | None
_Id = Annotated[int, Field(ge=0, le=MAX_INT)]
Ids: TypeAlias = list[_Id]
StopTokenIds: TypeAlias = Annotated[list[_Id], Field(max_length=MAX_STOP_TOKEN_IDS)] | None
_Text = Annotated[str, Field(min_length=1)]
_Prompt = Annotated[list[_Id], Field(min_length=1)]
Prompts: TypeAlias = (
    _Text
    | _Prompt
    | Annotated[list[_Text], Field(min_length=1)]
    | Annotated[list[_Prompt], Field(min_length=1)]
)


WORDS: Final = {
    "string_type": "be a string",
    "string_unicode": "be a string of Unicode characters",
    "string_too_short": "have {min_length} or more characters",
    "string_too_long": "have no more than {max_length} characters",
    "string_pattern_mismatch": "match {pattern}",
    "int_type": "be an integer",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "greater_than": "be greater than {gt}",
    "greater_than_equal": "be at least {ge}",
    "less_than": "be less than {lt}",
    "less_than_equal": "be at most {le}",
    "bool_type": "be true or false",
    "literal_error": "be {expected}",
    "list_type": "be a list",
    "tuple_type": "be a list",
    "too_short": "have {min_length} or more entries",
    "too_long": "have no more than {max_length} entries",
    "dict_type": "be an object",
    "model_type": "be an object",
    "dataclass_exact_type": "be a string or a list of blocks",
    "none_required": "be null",
}
"""What a value must do, by pydantic's error type."""
_OF_VALIDATORS: Final = ("value_error", "unsupported")
_OF_FIELDS: Final = ("missing", *_OF_VALIDATORS)
"""Errors of a field that may be missing from the body."""
OTHERWISE: Final = "be as /openapi.json describes it"


class StrictFields(BaseModel):
    """A model without type conversion: "1" is not a number and true is not an integer."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class FieldFault(NamedTuple):
    """The first validation error of a request.

    Attributes:
      kind: pydantic's error type.
      param: the field's path in the body.
      message: the message of our own validator, or what the value must do.
      value: the invalid value.
    """

    kind: str
    param: str
    message: str
    value: object


class _Place(NamedTuple):
    """A position in a body.

    Attributes:
      path: names and indices in the body.
      num_before: number of parts of pydantic's path before the first part that names a union
        alternative instead of a value; all parts if there is none.
    """

    path: tuple[str | int, ...]
    num_before: int


def first_fault(error: ValidationError, body: Mapping[str, Any]) -> FieldFault:
    """Return the first error. For a value that matches no alternative of a union, report the
    alternative that matches furthest, or list all alternatives."""
    details = error.errors(include_url=False)
    first = details[0]
    place = _place(first, body)
    if place.num_before == len(first["loc"]):
        return _fault(place, [first])
    prefix = first["loc"][: place.num_before]
    forms = [one for one in details if one["loc"][: len(prefix)] == prefix]
    places = [_place(one, body) for one in forms]
    deepest = max(places, key=lambda one: len(one.path))
    if len(deepest.path) > len(prefix):
        return _fault(deepest, [forms[places.index(deepest)]])
    return _fault(deepest, forms)


def _fault(place: _Place, details: Sequence[ErrorDetails]) -> FieldFault:
    first = details[0]
    kind = first["type"]
    words = dict.fromkeys(
        WORDS.get(one["type"], OTHERWISE).format_map(one.get("ctx", {})) for one in details
    )
    message = "must " + " or ".join(words)
    if kind in _OF_VALIDATORS:
        message = first["msg"].removeprefix("Value error, ")
    return FieldFault(kind, ".".join(map(str, place.path)), message, first["input"])


def _place(detail: ErrorDetails, body: Mapping[str, Any]) -> _Place:
    value: Any = body
    path: list[str | int] = []
    loc = detail["loc"]
    num_before = len(loc)
    for number, part in enumerate(loc):
        is_field = detail["type"] in _OF_FIELDS and number == len(loc) - 1
        has_part = part in value if isinstance(value, dict) else _has_index(value, part)
        if has_part:
            value = value[part]
        if has_part or is_field:
            path.append(part)
        else:
            num_before = min(num_before, number)
    return _Place(tuple(path), num_before)


def _has_index(value: object, part: str | int) -> bool:
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


Choice = Annotated[list[str], Field(min_length=1, max_length=1024)]
Text = Annotated[str, Field(min_length=1)]
Schema = dict[str, Any]


class NamedSchema(StrictFields):
    """A JSON Schema with a name."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(StrictFields):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(StrictFields):
    """vLLM's `structured_outputs`: exactly one field must be set."""

    json_: Annotated[Schema | Text | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choice | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None


class ConstraintFields(StrictFields):
    """All fields that constrain the output; at most one may be used."""

    response_format: ResponseFormat | None = Field(
        default=None,
        description="Output format: text (default), a JSON object, or a JSON Schema.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None,
        description="Output format: one of json, regex, choice, grammar and json_object.",
    )
    guided_json: Schema | Text | None = Field(
        default=None, description="Older name of structured_outputs.json."
    )
    guided_regex: Text | None = Field(
        default=None, description="Older name of structured_outputs.regex."
    )
    guided_choice: Choice | None = Field(
        default=None, description="Older name of structured_outputs.choice."
    )
    guided_grammar: Text | None = Field(
        default=None, description="Older name of structured_outputs.grammar."
    )


MAX_TOOLS: Final = 128
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(StrictFields):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictFields):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: Function


class FunctionName(StrictFields):
    """A function's name."""

    name: ToolName


class NamedTool(StrictFields):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(StrictFields):
    """A called function. `arguments` is JSON in a string."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str


class ToolCall(StrictFields):
    """A tool call in an earlier assistant turn."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


def offered_function(
    name: str, description: str | None, parameters: Schema | None, *, strict: bool | None
) -> Tool:
    """Return a tool for a function given in another API's format."""
    function = Function(name=name, description=description, parameters=parameters, strict=strict)
    return Tool(type="function", function=function)


def named_tool(name: str) -> NamedTool:
    """Return the tool choice for one function."""
    return NamedTool(type="function", function=FunctionName(name=name))


def earlier_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """Return a tool call of an earlier turn; `arguments` is JSON."""
    return ToolCall(id=call_id, function=CalledFunction(name=name, arguments=arguments))


class ToolFields(StrictFields):
    """Tools and how the model may use them."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call; default: none."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        default=None,
        description="Whether the model must call a function, or which one; default: auto.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Allow several tool calls in one answer; default: true."
    )

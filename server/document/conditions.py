"""Conditions between fields, as JSON Schema: what validators refuse although each field is right.

By the name of a component. JSON Schema has no words for the rest (RELATIONS): sums of two fields,
names that occur in another field, values that are programs.
"""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

RELATIONS: Final = (
    "the tokens of a prompt and its completion fit into the context, and min_tokens and a budget "
    "of reasoning into max_tokens; a tool has a name of its own, and tool_choice names one of "
    "tools; a message that is to be continued is the last, of the assistant and not empty; text_1 "
    "and text_2 have as many texts, or one; only one of response_format, structured_outputs and "
    "guided_ asks for something; a JSON Schema, a regular expression and a grammar can be "
    "compiled; the model's chat template takes the conversation, and shows the tools"
)
"""What else holds between fields; the document says it in prose."""

_NULL: Final[Schema] = {"type": "null"}
_OFF: Final[Schema] = {"enum": [None, False]}
_ONE_OR_MORE: Final[Schema] = {"type": "array", "minItems": 1}
_EMPTY: Final[Schema] = {"anyOf": [_NULL, {"type": "array", "maxItems": 0}]}
_TEXT: Final[Schema] = {"type": "string"}
_CONTENT: Final[Schema] = {"type": ["string", "array"]}


def _has(**properties: Schema) -> Schema:
    """Return the schema of objects that have all of these."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _may_have(**properties: Schema) -> Schema:
    """Return the schema of objects whose properties are so where they are there."""
    return {"properties": properties}


def _either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


_STREAM_OPTIONS: Final = _either(_may_have(stream_options=_NULL), _has(stream={"const": True}))
_TOOL_CHOICE: Final = _either(
    _may_have(tool_choice={"enum": [None, "none", "auto"]}), _has(tools=_ONE_OR_MORE)
)
_TOOL_USE: Final = _either(
    _may_have(tool_choice=_either(_NULL, _has(type={"enum": ["auto", "none"]}))),
    _has(tools=_ONE_OR_MORE),
)
_CONSTRAINTS: Final = _either(
    _may_have(structured_outputs=_NULL),
    _may_have(response_format=_either(_NULL, _has(type={"const": "text"}))),
)
_GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_NO_EARLIER: Final = _may_have(previous_response_id=_NULL)
_TEXT_PART: Final = _has(type={"enum": ["text", "input_text", "output_text"]}, text=_TEXT)
_TEXTS: Final = _either(_TEXT, {"type": "array", "items": _TEXT_PART})
_RESULT: Final = _has(type={"const": "tool_result"}, tool_use_id=_TEXT)
_BLOCK: Final = _either(
    _TEXT_PART,
    _has(type={"const": "tool_use"}, id=_TEXT, name=_TEXT, input={"type": "object"}),
    {**_RESULT, "properties": {**_RESULT["properties"], "content": _TEXTS}},
    _has(type={"const": "thinking"}, thinking=_TEXT),
    _has(type={"const": "redacted_thinking"}),
)
_REASONING_TEXT: Final = _has(type={"const": "reasoning_text"}, text=_TEXT)
_REASONING: Final = _either(_NULL, _TEXT, {"type": "array", "items": _REASONING_TEXT})
_MORE_THAN_REASONING: Final = _may_have(
    input={"anyOf": [_NULL, _TEXT, {"contains": {"not": _has(type={"const": "reasoning"})}}]}
)
_CHOICES: Final = {"items": {"minLength": 1}}

CONDITIONS: Final[dict[str, tuple[Schema, ...]]] = {
    "Message": (
        _either(
            {**_has(content=_CONTENT), "properties": {"content": _CONTENT, "tool_calls": _EMPTY}},
            _has(role={"const": "assistant"}, tool_calls=_ONE_OR_MORE),
        ),
    ),
    "ResponseFormat": (
        _either(
            _may_have(type={"enum": ["text", "json_object"]}),
            _has(json_schema={"type": "object"}),
        ),
    ),
    "StructuredOutputs": (
        {
            "oneOf": [
                _has(**{name: {"not": _NULL}})
                for name in ("json", "regex", "choice", "grammar", "json_object")
            ]
        },
        _may_have(choice=_CHOICES),
    ),
    "ChatRequest": (
        _either(_may_have(top_logprobs=_NULL), _has(logprobs={"const": True})),
        _STREAM_OPTIONS,
        _TOOL_CHOICE,
        _CONSTRAINTS,
    ),
    "CompletionRequest": (
        _either(_may_have(echo=_OFF), _may_have(logprobs=_NULL)),
        _STREAM_OPTIONS,
        _CONSTRAINTS,
    ),
    "InputItem": (
        _either(
            {
                **_has(role=_TEXT, content=_CONTENT),
                "properties": {
                    "type": {"const": "message"},
                    "role": _TEXT,
                    "content": _CONTENT,
                },
            },
            _has(type={"const": "function_call"}, call_id=_TEXT, name=_TEXT, arguments=_TEXT),
            _has(type={"const": "function_call_output"}, call_id=_TEXT, output=_CONTENT),
            {
                **_has(type={"const": "reasoning"}),
                "properties": {"type": {"const": "reasoning"}, "content": _REASONING},
            },
        ),
    ),
    "TextFormat": (
        _either(
            _may_have(type={"enum": ["text", "json_object"]}),
            _has(name=_TEXT, schema={"type": "object"}),
        ),
    ),
    "ResponseRequest": (
        _either(
            _may_have(top_logprobs={"enum": [None, 0]}),
            _has(
                include={
                    "type": "array",
                    "contains": {"const": "message.output_text.logprobs"},
                }
            ),
        ),
        _NO_EARLIER,
        _STREAM_OPTIONS,
        _TOOL_CHOICE,
        _MORE_THAN_REASONING,
    ),
    "InputTokensRequest": (_NO_EARLIER, _TOOL_CHOICE, _MORE_THAN_REASONING),
    "Turn": (_may_have(content=_either(_TEXT, {"type": "array", "items": _BLOCK})),),
    "ThinkingConfig": (
        _either(
            _has(type={"enum": ["disabled", "adaptive"]}),
            _has(budget_tokens={"type": "integer"}),
        ),
    ),
    "ToolUse": (
        _either(
            _has(type={"const": "tool"}, name=_TEXT),
            _may_have(type={"enum": ["auto", "any", "none"]}, name=_NULL),
        ),
    ),
    "MessagesRequest": (_TOOL_USE,),
    "CountRequest": (_TOOL_USE,),
    "TokenizeRequest": (
        _either(
            {**_has(prompt=_TEXT), "properties": {"prompt": _TEXT, "messages": _NULL}},
            {
                **_has(messages=_ONE_OR_MORE),
                "properties": {"messages": _ONE_OR_MORE, "prompt": _NULL},
            },
        ),
    ),
    "OllamaGenerate": (_either(_may_have(raw=_OFF), _may_have(system={"enum": [None, ""]})),),
    "OllamaShow": (_either(_has(model=_TEXT), _has(name=_TEXT)),),
}


UNLISTED: Final[dict[str, tuple[str, ...]]] = {
    "ChatRequest": (*_GUIDED, "continue_final_message"),
    "CompletionRequest": _GUIDED,
}
"""Fields that are served, but are no properties in the document: the older names of what
structured_outputs says, of which each excludes every other, and one that depends on the end of the
conversation. With conditions for all of them the programs that make requests from a document give
up."""
MORE: Final = "x-triolet-more"
"""Where they stand instead."""


def add_conditions(schemas: dict[str, Schema]) -> None:
    """Add to each component what its validators ask for beyond the types of its fields."""
    for component, names in UNLISTED.items():
        if component in schemas:
            properties = schemas[component]["properties"]
            schemas[component][MORE] = {name: properties.pop(name) for name in names}
    for name, conditions in CONDITIONS.items():
        if name in schemas:
            schemas[name]["allOf"] = [*schemas[name].get("allOf", ()), *conditions]

"""Conditions between request fields and limits of this server, as JSON Schema for /openapi.json.

Keyed by component name. Conditions that JSON Schema cannot express (sums of fields, names that
another field must contain, programs as values) are described in RELATIONS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from triolet.config import AUTO

from ..api.auto import is_auto
from ..api.fields import MAX_INT
from ..api.ollama.schema import TAG
from ..jobs.forms import MAX_WINDOW_NUMBER, MAX_WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..api.services import Services


Schema = dict[str, Any]

RELATIONS: Final = (
    "prompt and completion tokens must fit into the context; min_tokens and the reasoning budget "
    "must fit into max_tokens; tool names must be unique, and tool_choice must name one of tools; "
    "a message to continue must be the last one, from the assistant and not empty; text_1 and "
    "text_2 must have equally many texts, or one of them a single text; only one of "
    "response_format, structured_outputs and guided_* may be set; JSON Schemas, regular "
    "expressions and grammars must compile; the model's chat template must accept the conversation "
    "and show the tools; responses and items that are named must be stored"
)
"""The remaining conditions between fields, as prose in the document."""

_UNBOUNDED: Final = {
    ("InputTokensRequest", "max_output_tokens"),
    ("InputTokensRequest", "min_tokens"),
    ("MessagesRequest", "max_tokens"),
}
"""Limits on an answer's length that have no effect or are cut to what fits into the context."""
_NULL: Final[Schema] = {"type": "null"}
_OFF: Final[Schema] = {"enum": [None, False]}
_ONE_OR_MORE: Final[Schema] = {"type": "array", "minItems": 1}
_EMPTY: Final[Schema] = {"anyOf": [_NULL, {"type": "array", "maxItems": 0}]}
_TEXT: Final[Schema] = {"type": "string"}
_CONTENT: Final[Schema] = {"type": ["string", "array"]}


def _has(**properties: Schema) -> Schema:
    """Return the schema of objects that have all of these properties."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _may_have(**properties: Schema) -> Schema:
    """Return the schema of objects that match these properties where present."""
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
            _has(type={"const": "item_reference"}, id=_TEXT),
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
        _STREAM_OPTIONS,
        _TOOL_CHOICE,
        _MORE_THAN_REASONING,
    ),
    "InputTokensRequest": (_TOOL_CHOICE, _MORE_THAN_REASONING),
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


_STATELESS: Final = _may_have(previous_response_id=_NULL, store=_OFF)
STATELESS: Final[dict[str, tuple[Schema, ...]]] = {
    "InputItem": (_may_have(type={"not": {"const": "item_reference"}}),),
    "InputTokensRequest": (_STATELESS,),
    "ResponseRequest": (_STATELESS,),
}
"""Additional conditions when responses are not stored."""

UNLISTED: Final[dict[str, tuple[str, ...]]] = {
    "ChatRequest": (*_GUIDED, "continue_final_message"),
    "CompletionRequest": _GUIDED,
}
"""Fields that are served but not listed as properties: the older, mutually exclusive names of
structured_outputs, and a field that depends on the end of the conversation. Programs that generate
requests from a document give up if it has conditions for all of them."""
MORE: Final = "x-triolet-more"
"""The extension that lists these fields instead."""


def add_conditions(schemas: dict[str, Schema], services: Services) -> None:
    """Add the conditions that validators check beyond the types of fields."""
    for component, names in UNLISTED.items():
        if component in schemas:
            properties = schemas[component]["properties"]
            schemas[component][MORE] = {name: properties.pop(name) for name in names}
    stateless = {} if services.config.responses.ttl_s else STATELESS
    for name, conditions in (*CONDITIONS.items(), *stateless.items()):
        if name in schemas:
            schemas[name]["allOf"] = [*schemas[name].get("allOf", ()), *conditions]


_LOGIT_BIAS_KEYS: Final = "^[0-9]{1,9}$"
_UNITS_S: Final = (("s", 1), ("m", 60), ("h", 3600), ("d", 86_400))


def up_to(most: int) -> str:
    """Return a regular expression for decimal numbers from 1 to `most`, without leading zeros."""
    digits = str(most)
    size = len(digits)
    parts = [f"[1-9][0-9]{{0,{size - 2}}}"] if size > 1 else []
    for place, digit in enumerate(digits):
        lowest = 1 if place == 0 else 0
        if int(digit) > lowest:
            rest = f"[0-9]{{{size - place - 1}}}" if place < size - 1 else ""
            parts.append(f"{digits[:place]}[{lowest}-{int(digit) - 1}]{rest}")
    return f"(?:{'|'.join([*parts, digits])})"


def add_limits(schemas: dict[str, Schema], services: Services) -> None:
    """Apply this server's limits to fields.

    Args:
      schemas: request schemas by component name; modified in place.
      services: the server's parts.
    """
    names = model_names(services)
    # Use the widest limits of all models; a model with narrower ones refuses the rest itself.
    ids = max(model.text.vocab_size for model in services.models) - 1
    room = max(model.fleet.max_model_len for model in services.models) - 1
    config = services.config
    for component, schema in schemas.items():
        fields = schema.get("properties", {})
        for name in ("model", "name") if component == "OllamaShow" else ("model",):
            if name in fields and names:
                _narrow(fields[name], "string", enum=_tagged(names, component))
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
            if name in fields and (component, name) not in _UNBOUNDED:
                _narrow(fields[name], "integer", maximum=room)
        for name in ("prompt", "input", "tokens", "stop_token_ids"):
            for part in _parts(fields.get(name, {})):
                if part.get("type") == "integer" and part.get("maximum") == MAX_INT:
                    part["maximum"] = ids
        if "logit_bias" in fields:
            _narrow_bias(fields["logit_bias"], ids)
        if "n" in fields:
            _narrow(fields["n"], "integer", maximum=config.max_choices)
    _narrow_lists(schemas, services)
    if "BatchFields" in schemas:
        most = {unit: min(MAX_WINDOW_S // size, MAX_WINDOW_NUMBER) for unit, size in _UNITS_S}
        window = "|".join(up_to(number) + unit for unit, number in most.items())
        schemas["BatchFields"]["properties"]["completion_window"]["pattern"] = f"^(?:{window})$"


def model_names(services: Services) -> list[str]:
    """Return the model names that requests may use; empty if any name is accepted."""
    if services.models.takes_any_name:
        return []
    return [*services.models.names, *([AUTO] if is_auto(AUTO, services) else [])]


def _tagged(names: list[str], component: str) -> list[str]:
    if not component.startswith("Ollama"):
        return names
    return list(dict.fromkeys([*names, *(name + TAG for name in names)]))


def _narrow_bias(schema: Schema, largest: int) -> None:
    for part in _parts(schema):
        if _LOGIT_BIAS_KEYS in part.get("patternProperties", {}):
            value = part["patternProperties"].pop(_LOGIT_BIAS_KEYS)
            part["patternProperties"][f"^(?:0|{up_to(largest)})$"] = value
            part["additionalProperties"] = False


def _narrow_lists(schemas: dict[str, Schema], services: Services) -> None:
    """Limit the number of prompts, inputs and documents, and the length of token id lists."""
    config = services.config
    room = max(model.fleet.max_model_len for model in services.models) - 1
    longest = max(model.embedding.max_input_tokens or room for model in services.models)
    for component, field, most, most_ids in (
        ("CompletionRequest", "prompt", config.max_prompts, room),
        ("EmbeddingFields", "input", config.embedding.max_inputs, longest),
        ("OllamaEmbed", "input", config.embedding.max_inputs, longest),
        ("RerankRequest", "documents", config.embedding.max_documents, longest),
        ("ScoreRequest", "text_1", config.embedding.max_documents, longest),
        ("ScoreRequest", "text_2", config.embedding.max_documents, longest),
    ):
        schema = schemas.get(component, {}).get("properties", {}).get(field, {})
        for part in _parts(schema):
            if part.get("type") == "array":
                is_ids = part["items"].get("type") == "integer"
                part["maxItems"] = most_ids if is_ids else most
    model = services.models.first.embedding
    if any(other.embedding != model for other in services.models):
        return  # the allowed dimensions depend on the model
    for component in ("EmbeddingFields", "OllamaEmbed"):
        dimensions = schemas.get(component, {}).get("properties", {}).get("dimensions", {})
        if model.size:
            _narrow(dimensions, "integer", maximum=model.size)


def _narrow(schema: Schema, kind: str, **bounds: object) -> None:
    """Apply limits to the alternatives of one type."""
    for part in [schema, *schema.get("anyOf", ())]:
        if part.get("type") == kind:
            part |= bounds


def _parts(schema: Schema) -> Iterator[Schema]:
    """Yield a schema and all of its parts."""
    yield schema
    for part in schema.get("anyOf", ()):
        yield from _parts(part)
    if isinstance(items := schema.get("items"), dict):
        yield from _parts(items)

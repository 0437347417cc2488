"""The ways in which a client says what its completion has to be. Knows names and types.

`response_format` is OpenAI's; `structured_outputs` and the older `guided_…` are vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .strict_fields import StrictFields

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
    """OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(StrictFields):
    """vLLM's form: exactly one of these."""

    json_: Annotated[Schema | Text | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choice | None = None
    grammar: Text | None = None
    json_object: Literal[True] | None = None


class ConstraintFields(StrictFields):
    """All of them; at most one may be used."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Choice | None = None
    guided_grammar: Text | None = None

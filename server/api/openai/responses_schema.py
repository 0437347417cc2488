"""What may be asked of the Responses API, over HTTP and on a WebSocket: names, types, ranges."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from triolet.errors import invalid_request
from triolet.sampling import MAX_TOP_LOGPROBS

from ...text.process import job
from .. import fields
from ..errors import echo
from ..fields import MAX_INT, MAX_TOOLS, NamedSchema, ResponseFormat, ToolName
from ..schemas import (
    IGNORED,
    MAX_MESSAGES,
    OWN_FUNCTION,
    UNSUPPORTED,
    CacheFields,
    Effort,
    SamplingFields,
    ServedName,
    ServiceFields,
    Stream,
    StrictModel,
    TemplateKwargs,
    ThinkingBudget,
    joined_text,
)

LANE: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SKIPPED_TOOLS: Final = ("namespace", "web_search")
"""Agents offer them with every request, and go on without them."""
INCLUDE_LOGPROBS: Final = "message.output_text.logprobs"


def _messages(value: object) -> object:
    """Return the short form, a string, as the one message that it means."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _known_item(value: object) -> object:
    if isinstance(value, str) and value not in _NEEDED:
        raise PydanticCustomError(
            "unsupported", f"an item of type {echo(value)} (send what it says as a message)"
        )
    return value


def _own_tool(value: object) -> object:
    if isinstance(value, str) and value != "function":
        raise PydanticCustomError("unsupported", f"a tool of type {echo(value)}{OWN_FUNCTION}")
    return value


_NEEDED: Final = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
    "item_reference": ("id",),
}
"""What an item of each type has to hold."""


def _item_content(value: object, info: ValidationInfo) -> object:
    """Return the text of an item's content; reasoning has parts of its own kind."""
    if info.data.get("type") != "reasoning" or not isinstance(value, list):
        return joined_text(value)
    parts = [part for part in value if isinstance(part, dict)]
    texts = [part.get("text") for part in parts if part.get("type") == "reasoning_text"]
    if len(texts) < len(value) or not all(isinstance(text, str) for text in texts):
        raise ValueError("parts of reasoning must have the type reasoning_text and a text")
    return "".join(map(str, texts))


Text = Annotated[
    str | None, BeforeValidator(joined_text, json_schema_input_type=fields.Content | None)
]


class InputItem(StrictModel):
    """A turn, a call of a tool or what came of one: as a client writes it, or as it was given; or
    the id of one that is stored."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[
        Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"],
        BeforeValidator(_known_item),
    ] = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Annotated[
        str | None,
        BeforeValidator(_item_content, json_schema_input_type=fields.Content | None),
    ] = None
    call_id: str | None = None
    # As the model wrote it, who may have made it up.
    name: str | None = None
    arguments: str | None = None
    output: Text = None

    @model_validator(mode="after")
    def _is_whole(self) -> InputItem:
        for name in _NEEDED[self.type]:
            if getattr(self, name) is None:
                raise ValueError(f"needs {name}")
        return self


class ReasoningConfig(StrictModel):
    """How much to reason. Reasoning is shown as it is, so there are no summaries."""

    model_config = ConfigDict(extra="ignore")

    effort: Effort | None = None


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Annotated[Literal["function"], BeforeValidator(_own_tool)]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(StrictModel):
    """The one function that has to be called."""

    type: Annotated[Literal["function"], BeforeValidator(_own_tool)]
    name: ToolName


class TextFormat(StrictModel):
    """What the text has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def of_chat(self) -> ResponseFormat:
        """Return the same in the words of a chat.

        Raises:
          RequestError: part of it is missing.
        """
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        for name, value in (("name", self.name), ("schema", self.schema_)):
            if value is None:
                raise invalid_request("is required with this type", f"text.format.{name}")
        named = NamedSchema.model_construct(
            name=self.name, schema_=self.schema_, strict=self.strict
        )
        return ResponseFormat(type="json_schema", json_schema=named)


class TextConfig(StrictModel):
    """How the text is to be written. How verbose it should be is a hint."""

    model_config = ConfigDict(extra="ignore")

    format: TextFormat | None = None


class CacheOptions(StrictModel):
    """What is asked of the prefix cache."""

    model_config = ConfigDict(extra="ignore")

    prewarm: bool | None = None


class FunctionFields(StrictModel):
    """Tools, and how they are to be used."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call; default: none."
    )
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = Field(
        default=None, description="Whether a function is called, or which one; default: auto."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Allow several calls in one answer; default: true."
    )


# Of a million wrong items only the first makes an error: all would take seconds of one core.
Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ResponseFields(SamplingFields, FunctionFields, CacheFields, ServiceFields):
    """What an answer is made from."""

    skipped_tools: ClassVar[tuple[str, ...]] = SKIPPED_TOOLS
    ignored: ClassVar[frozenset[str]] = IGNORED | {"access_programs", "image"}
    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        **UNSUPPORTED,
        "prompt": ("a stored prompt (send its text as instructions or input)", ()),
        "conversation": ("a stored conversation (go on with previous_response_id instead)", ()),
    }

    model: ServedName = None
    input: Annotated[Items, BeforeValidator(_messages, json_schema_input_type=str | Items)] = Field(
        description="The conversation: a text, or items, oldest first."
    )
    instructions: str | None = Field(
        default=None, description="System text in front of the conversation; default: none."
    )
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None,
        description="Longest answer with its reasoning, in tokens; default: what fits.",
    )
    previous_response_id: str | None = Field(
        default=None, description="Response to go on from, of this WebSocket or a stored one."
    )
    store: bool | None = Field(
        default=None, description="Keep the response; default: where the server keeps any."
    )
    # All but the first speak of items that never occur here.
    include: (
        Annotated[
            list[
                Literal[
                    "message.output_text.logprobs",
                    "message.input_image.image_url",
                    "reasoning.encrypted_content",
                    "file_search_call.results",
                    "web_search_call.results",
                    "web_search_call.action.sources",
                    "code_interpreter_call.outputs",
                    "computer_call_output.output.image_url",
                ]
            ],
            Field(fail_fast=True),
        ]
        | None
    ) = Field(
        default=None,
        description="What to add; message.output_text.logprobs adds log probabilities.",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None,
        description="Likeliest tokens to list at each place; needs include; default: 0.",
    )
    text: TextConfig | None = Field(
        default=None, description="Form of the answer, as format: text (default) or JSON."
    )
    metadata: fields.Metadata | None = Field(
        default=None, description="Pairs of texts that come back with the response; default: none."
    )
    chat_template_kwargs: TemplateKwargs = None
    reasoning: ReasoningConfig | None = Field(
        default=None, description="How much to reason, as effort; default: the template's."
    )
    thinking_token_budget: ThinkingBudget = None
    prompt_cache_options: CacheOptions | None = Field(
        default=None, description="With prewarm, only fill the prompt cache; default: answer."
    )

    @property
    def wants_logprobs(self) -> bool:
        """Whether tokens are to be listed with what the model thought of them."""
        return INCLUDE_LOGPROBS in (self.include or ())

    @property
    def text_format(self) -> TextFormat:
        """What the text has to be."""
        given = None if self.text is None else self.text.format
        return given or TextFormat(type="text")

    @property
    def only_warms(self) -> bool:
        """Whether the prompt's KV is all that is asked for."""
        options = self.prompt_cache_options
        return options is not None and bool(options.prewarm)


class ResponseStreamOptions(StrictModel):
    """How a stream is written. Its events carry no random padding."""

    include_obfuscation: Literal[False] | None = None


class ResponseRequest(ResponseFields):
    """POST /v1/responses."""

    stream: Stream = None
    stream_options: ResponseStreamOptions | None = Field(
        default=None, description="What a stream holds; there is no padding to turn on."
    )


class InputTokensRequest(ResponseFields):
    """POST /v1/responses/input_tokens: how long a prompt is. What else an answer would be made from
    changes nothing, and may be here."""

    ignored: ClassVar[frozenset[str]] = ResponseFields.ignored | {"personality"}


class ResponseCreate(ResponseFields):
    """`response.create` on a WebSocket: begin an answer."""

    stream: Literal[True] | None = None
    resumable: bool | None = None
    stream_id: str | None = None
    generate: bool | None = None

    @property
    def only_warms(self) -> bool:
        """Whether the prompt's KV is all that is asked for."""
        return self.generate is False or super().only_warms


class ResponseResume(StrictModel):
    """`response.resume`: go on with an answer whose connection was cut."""

    response_id: Annotated[str, Field(max_length=64)]
    sequence_number: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    stream_id: str | None = None


class ResponseCancel(StrictModel):
    """`response.cancel`: end an answer, or all answers of a lane."""

    response_id: str | None = None
    stream_id: str | None = None
    event_id: str | None = None


@job
def stored_items(own_input: bytes, response: bytes) -> list[dict[str, Any]]:
    """Return the input and the output of a stored response, as they are listed."""
    return [*msgspec.json.decode(own_input), *msgspec.json.decode(response)["output"]]

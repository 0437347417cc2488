"""Request schemas of the Responses API, over HTTP and WebSocket."""

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
"""Tool types that agents send with every request and can work without."""
INCLUDE_LOGPROBS: Final = "message.output_text.logprobs"


def _messages(value: object) -> object:
    """Convert the short form, a string, to a list with one message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


def _known_item(value: object) -> object:
    if isinstance(value, str) and value not in _NEEDED:
        raise PydanticCustomError(
            "unsupported", f"an item of type {echo(value)} (send its content as a message)"
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
"""Required fields, by item type."""


def _item_content(value: object, info: ValidationInfo) -> object:
    """Return the text of an item's content; reasoning has its own kind of parts."""
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
    """A message, tool call or tool result, as written by a client or returned by the API; or the id
    of a stored item."""

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
    # The model may have made the name up, so it is not validated.
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
    """How much to reason. Reasoning is shown in full, so there are no summaries."""

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
    """The function that the model must call."""

    type: Annotated[Literal["function"], BeforeValidator(_own_tool)]
    name: ToolName


class TextFormat(StrictModel):
    """The required format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def of_chat(self) -> ResponseFormat:
        """Return the same format as a chat request's field.

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
    """Text settings. `verbosity` is a hint."""

    model_config = ConfigDict(extra="ignore")

    format: TextFormat | None = None


class CacheOptions(StrictModel):
    """Prefix cache settings."""

    model_config = ConfigDict(extra="ignore")

    prewarm: bool | None = None


class FunctionFields(StrictModel):
    """Tools and how the model may use them."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call; default: none."
    )
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = Field(
        default=None,
        description="Whether the model must call a function, or which one; default: auto.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Allow several tool calls in one answer; default: true."
    )


# Report only the first of up to a million invalid items; all of them would take seconds.
Items = Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ResponseFields(SamplingFields, FunctionFields, CacheFields, ServiceFields):
    """Fields that determine an answer."""

    skipped_tools: ClassVar[tuple[str, ...]] = SKIPPED_TOOLS
    ignored: ClassVar[frozenset[str]] = IGNORED | {"access_programs", "image"}
    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        **UNSUPPORTED,
        "prompt": ("a stored prompt (send its text as instructions or input)", ()),
        "conversation": ("a stored conversation (use previous_response_id instead)", ()),
    }

    model: ServedName = None
    input: Annotated[Items, BeforeValidator(_messages, json_schema_input_type=str | Items)] = Field(
        description="The conversation: a text, or items, oldest first."
    )
    instructions: str | None = Field(default=None, description="System prompt; default: none.")
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None,
        description="Maximum number of output tokens, including reasoning; default: what fits.",
    )
    previous_response_id: str | None = Field(
        default=None, description="Id of the response to continue: of this WebSocket, or stored."
    )
    store: bool | None = Field(
        default=None,
        description="Store the response; default: true if the server stores responses.",
    )
    # All but the first refer to items that never occur here.
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
        description="Additional output; message.output_text.logprobs adds log probabilities.",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None,
        description="Number of most likely tokens to list per token; needs include; default: 0.",
    )
    text: TextConfig | None = Field(
        default=None, description="Output format, in format: text (default) or JSON."
    )
    metadata: fields.Metadata | None = Field(
        default=None,
        description="Keys and values that are returned with the response; default: none.",
    )
    chat_template_kwargs: TemplateKwargs = None
    reasoning: ReasoningConfig | None = Field(
        default=None, description="Reasoning effort, in effort; default: the template's."
    )
    thinking_token_budget: ThinkingBudget = None
    prompt_cache_options: CacheOptions | None = Field(
        default=None, description="With prewarm, only fill the prefix cache; default: answer."
    )

    @property
    def wants_logprobs(self) -> bool:
        """Whether to list tokens with their log probabilities."""
        return INCLUDE_LOGPROBS in (self.include or ())

    @property
    def text_format(self) -> TextFormat:
        """The required format of the text."""
        given = None if self.text is None else self.text.format
        return given or TextFormat(type="text")

    @property
    def only_warms(self) -> bool:
        """Whether the request only computes the prompt's KV."""
        options = self.prompt_cache_options
        return options is not None and bool(options.prewarm)


class ResponseStreamOptions(StrictModel):
    """Stream settings. Events have no random padding."""

    include_obfuscation: Literal[False] | None = None


class ResponseRequest(ResponseFields):
    """The body of POST /v1/responses."""

    stream: Stream = None
    stream_options: ResponseStreamOptions | None = Field(
        default=None, description="Stream options; padding is never sent."
    )


class InputTokensRequest(ResponseFields):
    """The body of POST /v1/responses/input_tokens. Fields that do not affect the prompt are
    accepted without effect."""

    ignored: ClassVar[frozenset[str]] = ResponseFields.ignored | {"personality"}


class ResponseCreate(ResponseFields):
    """`response.create` on a WebSocket: start an answer."""

    stream: Literal[True] | None = None
    resumable: bool | None = None
    stream_id: str | None = None
    generate: bool | None = None

    @property
    def only_warms(self) -> bool:
        """Whether the request only computes the prompt's KV."""
        return self.generate is False or super().only_warms


class ResponseResume(StrictModel):
    """`response.resume`: continue an answer after its connection was cut."""

    response_id: Annotated[str, Field(max_length=64)]
    sequence_number: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    stream_id: str | None = None


class ResponseCancel(StrictModel):
    """`response.cancel`: cancel an answer, or all answers of a lane."""

    response_id: str | None = None
    stream_id: str | None = None
    event_id: str | None = None


@job
def stored_items(own_input: bytes, response: bytes) -> list[dict[str, Any]]:
    """Return the input and output items of a stored response, in the form in which they are
    listed."""
    return [*msgspec.json.decode(own_input), *msgspec.json.decode(response)["output"]]

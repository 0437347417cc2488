"""Request schemas of chats, completions and tokenization, and the handling of unknown names.

A name is applied (a field), accepted without effect (IGNORED), refused (UNSUPPORTED, unless its
value changes nothing), or unknown. Unknown names are ignored and listed in the response header
`x-triolet-ignored`; with `strict_requests` they are refused.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from triolet.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, MAX_TOP_K, MAX_TOP_LOGPROBS

from . import fields
from .errors import MAX_ECHO, echo, http_error, unsupported
from .fields import MAX_INT as MAX_INT
from .fields import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOOLS,
    ConstraintFields,
    FieldFault,
    Penalty,
    StrictFields,
    ToolCall,
    ToolFields,
    first_fault,
)
from .known_names import EXTENSIONS as EXTENSIONS
from .known_names import IGNORED as IGNORED
from .known_names import OWN_FUNCTION as OWN_FUNCTION
from .known_names import PARTS
from .known_names import UNSUPPORTED as UNSUPPORTED

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from triolet.errors import RequestError


MAX_MESSAGES: Final = 4096
TURNS_AT_ONCE: Final = 256
"""Turns of a conversation to convert before other tasks may run; some take 10 µs."""
MAX_PARTS: Final = 1024
"""Parts of one message; people attach a few files."""
MAX_DETOKENIZED: Final = 1 << 18
"""The longest context of served models; most have a shorter one."""


def _stop(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > MAX_STOP_STRINGS:
        raise ValueError(f"must have at most {MAX_STOP_STRINGS} strings")
    if not all(0 < len(text) <= MAX_STOP_CHARS for text in texts):
        raise ValueError(f"strings must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(texts)


StopStrings = Annotated[tuple[str, ...], BeforeValidator(_stop, json_schema_input_type=fields.Stop)]
"""One or more strings; the text ends before the first one found."""


def _logit_bias(value: object) -> object:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must be an object of at most {MAX_LOGIT_BIAS} token ids")
    pairs = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"the key {echo(key)} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of {key} must be a number from -100 to 100")
        pairs.append((int(key), float(bias)))
    return tuple(pairs)


def _token_ids(value: object) -> object:
    if value is None:
        return ()
    return _ids_up_to(MAX_STOP_TOKEN_IDS, value)


def _ids_up_to(most: int, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"must be a list of at most {most} token ids")
    return _ids(value)


def _ids(value: Sequence[object]) -> tuple[int, ...]:
    # Three passes over the list in C take a third of the time of one in Python.
    are_ints = set(map(type, value)) <= {int}
    if not are_ints or (value and (min(value) < 0 or max(value) > MAX_INT)):  # type: ignore[type-var,operator]
        raise ValueError("token ids must be integers of at least 0")
    return tuple(value)  # type: ignore[arg-type]


Prompt = str | tuple[int, ...]


def read_prompts(value: object) -> object:
    """Return prompts: one text or list of token ids, or a list of either."""
    items = value if isinstance(value, list) else [value]
    if items and type(items[0]) is int:
        items = [items]
    if not items:
        raise ValueError("is empty")
    prompts: list[Prompt] = []
    for item in items:
        if isinstance(item, str):
            prompts.append(item)
        elif isinstance(item, list):
            prompts.append(_ids(item))
        else:
            raise ValueError("must be a string, a list of token ids, or a list of either")
        if not item:
            raise ValueError("is empty")
    return tuple(prompts)


TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})


def joined_text(value: object) -> object:
    """Return the text of a message's content: a string, or a list of text parts."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_PARTS:
        raise ValueError(f"must have at most {MAX_PARTS} parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError("parts must be objects with a type")
        if kind not in TEXT_PARTS:
            advice = PARTS.get(kind, "send its text as a text part")
            raise PydanticCustomError("unsupported", f"content of type {echo(kind)} ({advice})")
        text = part.get("text")
        if not isinstance(text, str):
            raise ValueError("a text part must have a text")
        texts.append(text)
    return "".join(texts)


class StrictModel(StrictFields):
    """The fields of a request, or of a part of one.

    Attributes:
      ignored: names that the endpoint accepts without effect.
      unsupported: names that it refuses (see UNSUPPORTED).
      skipped_tools: tool types that it leaves out.
      kinds: all request models, by name.
    """

    ignored: ClassVar[frozenset[str]] = IGNORED
    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = UNSUPPORTED
    skipped_tools: ClassVar[tuple[str, ...]] = ()
    kinds: ClassVar[dict[str, type[StrictModel]]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        StrictModel.kinds[cls.__name__] = cls


_Call = TypeVar("_Call", bound=StrictFields)


def assistant_calls(calls: list[_Call] | None, info: ValidationInfo) -> list[_Call] | None:
    """Return the tool calls of a turn.

    Raises:
      ValueError: the turn is not the assistant's.
    """
    if calls and info.data.get("role") != "assistant":
        raise ValueError("is allowed only with the role assistant")
    return calls


class Message(StrictModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    # Name of the tool whose result the turn is; templates get no other names.
    name: str | None = None
    # The model's reasoning in that turn; newer clients call it `reasoning`.
    reasoning: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None
    # After the calls, because they may replace it.
    content: Annotated[
        str | None,
        BeforeValidator(joined_text, json_schema_input_type=fields.Content | None),
        Field(validate_default=True),
    ] = None

    @field_validator("tool_calls")
    @classmethod
    def _are_the_models(
        cls, calls: list[ToolCall] | None, info: ValidationInfo
    ) -> list[ToolCall] | None:
        return assistant_calls(calls, info)

    @field_validator("content")
    @classmethod
    def _says_something(cls, content: str | None, info: ValidationInfo) -> str | None:
        if content is None and not info.data.get("tool_calls"):
            raise ValueError("is required")
        return content


ServedName = Annotated[
    str | None,
    Field(description="Name of a served model, or MODEL:ADAPTER; default: the first model."),
]
Stream = Annotated[
    bool | None,
    Field(description="Stream the answer as server-sent events; default: false."),
]
ThinkingBudget = Annotated[
    Annotated[int, Field(ge=0, le=MAX_INT)] | None,
    Field(description="Maximum number of reasoning tokens; default: no limit."),
]


class ServiceFields(StrictModel):
    """Fields that decide how soon a request runs."""

    priority: Annotated[int, Field(ge=-100, le=100)] | None = Field(
        default=None,
        description="Priority among your own requests: lower runs earlier; default: 0.",
    )
    service_tier: fields.ServiceTier | None = Field(
        default=None, description="Service class; auto, default and scale use the plan's default."
    )


class CommonSamplingFields(StrictModel):
    """Sampling fields with the same name in every API."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, description="Randomness; 0 takes the most likely token; default: the model's."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Sample from the most likely tokens up to this total; default: the model's.",
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = Field(
        default=None,
        description="Sample from this many most likely tokens; 0, -1: all; default: the model's.",
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Drop tokens below this share of the most likely; default: the model's.",
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        default=None, description="Lower the logits of tokens that have occurred; default: 0."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        default=None, description="Lower logits by how often tokens have occurred; default: 0."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        default=None,
        description="Seed for reproducible sampling; default: random.",
    )
    stop: StopStrings = Field(
        default=(), description="Stop strings, not included in the output; default: none."
    )


class SamplingFields(CommonSamplingFields):
    """All fields that affect the choice of tokens and the end."""

    repetition_penalty: Penalty = Field(
        default=None, description="Divide the logits of tokens so far; default: the model's."
    )
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        BeforeValidator(_logit_bias, json_schema_input_type=fields.LogitBias),
    ] = Field(
        default=(),
        description="Numbers to add to the logits of tokens, by token id; default: none.",
    )
    stop_token_ids: Annotated[
        tuple[int, ...], BeforeValidator(_token_ids, json_schema_input_type=fields.StopTokenIds)
    ] = Field(default=(), description="Token ids that end the answer; default: none.")
    ignore_eos: bool | None = Field(
        default=None, description="Continue after the model's end tokens; default: false."
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        default=None,
        description="Minimum number of output tokens; default: 0.",
    )


CacheSalt = Annotated[str, Field(min_length=1, max_length=256)] | None
"""Requests with different salts share no KV, so that response times do not reveal another client's
prompts."""


ResponseCacheUse = Literal["allow", "refresh"] | None
"""Whether to use a stored answer, or to replace it; None to compute an answer and not store it. Has
no effect if the server's response cache is off."""


class CacheFields(StrictModel):
    """Cache settings."""

    cache_salt: CacheSalt = Field(
        default=None,
        description="Share the prefix cache only with requests of this salt; default: none.",
    )
    response_cache: ResponseCacheUse = Field(
        default=None,
        description="Use the response cache, or refresh its entry; default: do not use it.",
    )


class StreamOptions(StrictModel):
    """How a stream is written."""

    include_usage: bool | None = None
    # Every chunk has the counts so far: an extension of vLLM that benchmark clients use.
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationFields(SamplingFields, ConstraintFields, CacheFields, ServiceFields):
    """Fields shared by chats and plain completions."""

    model: ServedName = None
    n: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Number of choices per prompt; default: 1."
    )
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None,
        description="Maximum number of output tokens; default: what fits (/v1/completions: 16).",
    )
    stream: Stream = None
    stream_options: StreamOptions | None = Field(
        default=None, description="Stream options, such as token counts."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of the text; default: true."
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Include the stop string in the output; default: false."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Return the output's token ids; default: false."
    )


def shared_fields(request: StrictModel, but: Collection[str]) -> dict[str, Any]:
    """Return the fields of another API's request with the same name in a chat, except some."""
    names = GenerationFields.model_fields.keys() & type(request).model_fields.keys() - set(but)
    return {name: getattr(request, name) for name in names}


class TemplateSwitches(TypedDict, total=False):
    """Chat template switches that clients may set; common names among published templates."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    enable_thinking: bool
    thinking: bool


TemplateKwargs = Annotated[
    TemplateSwitches | None,
    Field(
        description="Switches of the chat template: enable_thinking, thinking; default: its own."
    ),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Reasoning effort. `none` turns reasoning off; other values are passed to templates that support
them, and are otherwise hints."""


class ChatRequest(GenerationFields, ToolFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="The conversation, oldest turn first."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None, description="Newer name of max_tokens; takes precedence over it."
    )
    logprobs: bool | None = Field(
        default=None, description="Return the log probability of each token; default: false."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None,
        description="Number of most likely tokens to list per token; needs logprobs; default: 0.",
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Start the assistant's turn at the end of the prompt; default: true.",
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Continue the last message, which must be the assistant's; default: false.",
    )
    chat_template_kwargs: TemplateKwargs = None
    reasoning_effort: Effort | None = Field(
        default=None, description="Reasoning effort; none turns it off; default: the template's."
    )
    thinking_token_budget: ThinkingBudget = None

    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        **UNSUPPORTED,
        "add_special_tokens": ("special tokens in addition to the chat template's", (False,)),
        "echo": ("repeating the last message", (False,)),
    }


class CompletionRequest(GenerationFields):
    """The body of POST /v1/completions."""

    prompt: Annotated[
        tuple[Prompt, ...], BeforeValidator(read_prompts, json_schema_input_type=fields.Prompts)
    ] = Field(description="A text or token ids to complete, or a list of either.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None,
        description="Number of most likely tokens to list per token; default: no logprobs.",
    )
    echo: bool | None = Field(
        default=None, description="Return the prompt before its completion; default: false."
    )

    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        **UNSUPPORTED,
        "add_special_tokens": ("a prompt without special tokens (send token ids)", (True,)),
    }


class TokenizeRequest(StrictModel):
    """The body of POST /tokenize: a prompt, or messages rendered as in a chat."""

    model: ServedName = None
    prompt: str | None = Field(default=None, description="Text to tokenize; send this or messages.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = Field(
        default=None, description="Conversation to render and tokenize; send this or prompt."
    )
    add_special_tokens: bool = Field(
        default=True, description="Add the tokenizer's special tokens to prompt; default: true."
    )
    add_generation_prompt: bool = Field(
        default=True, description="Start the assistant's turn after messages; default: true."
    )
    return_token_strs: bool = Field(
        default=False, description="Return each token's text; default: false."
    )


class DetokenizeRequest(StrictModel):
    """The body of POST /detokenize."""

    model: ServedName = None
    # Report one error for the whole list: a million bad ids would make a million errors.
    tokens: Annotated[
        tuple[int, ...],
        BeforeValidator(partial(_ids_up_to, MAX_DETOKENIZED), json_schema_input_type=fields.Ids),
    ] = Field(description="Token ids to detokenize.")


ModelT = TypeVar("ModelT", bound=StrictModel)


MAX_UNKNOWN: Final = 16
"""Maximum unknown names in a body. The extensions of all known servers together are fewer."""
EXTENSION_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TYPO_RATIO: Final = 0.8
"""Names at least this similar are a typing error or another server's name of a parameter
(`max_new_tokens`); ignoring them would change the answer."""


def take_unknown(kind: type[StrictModel], body: dict[str, Any]) -> tuple[str, ...]:
    """Remove the names that an endpoint ignores from a body, extensions and some tools; return
    them.

    A parameter of chats or completions, a name that resembles a parameter of this endpoint, and a
    malformed name stay in the body, so that `read_request` refuses them.

    Raises:
      RequestError: 400, there are more than MAX_UNKNOWN.
    """
    skipped = _take_tools(kind.skipped_tools, body)
    unknown = body.keys() - _known_names(kind)
    if not unknown:
        return skipped
    if len(unknown) > MAX_UNKNOWN:
        raise http_error(
            400,
            f"{len(unknown)} parameters are unknown, such as {echo(next(iter(unknown)))}; at most "
            f"{MAX_UNKNOWN} are ignored",
        )
    fields = _field_names(kind)
    others = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    names = tuple(
        name
        for name in body
        if name in unknown
        and (
            name in EXTENSIONS
            or (EXTENSION_NAME.fullmatch(name) and name not in others and not _meant(name, fields))
        )
    )
    for name in names:
        del body[name]
    return skipped + names


def _take_tools(types: tuple[str, ...], body: dict[str, Any]) -> tuple[str, ...]:
    tools = body.get("tools")
    if not types or not isinstance(tools, list):
        return ()
    of_types = [one.get("type") if isinstance(one, dict) else None for one in tools]
    body["tools"] = [tool for tool, kind in zip(tools, of_types, strict=True) if kind not in types]
    return tuple(f"tools.{name}" for name in types if name in of_types)


def _field_names(kind: type[StrictModel]) -> frozenset[str]:
    return frozenset(info.alias or name for name, info in kind.model_fields.items())


@cache
def _known_names(kind: type[StrictModel]) -> frozenset[str]:
    """Return all names that an endpoint recognizes; cached because every request needs it."""
    return _field_names(kind) | kind.ignored | kind.unsupported.keys()


def _meant(name: str, fields: Iterable[str]) -> str | None:
    """Return the parameter that an unknown name resembles, or None."""
    if not EXTENSION_NAME.fullmatch(name):
        return None  # the cost is the product of the lengths
    return next(iter(get_close_matches(name, fields, 1, TYPO_RATIO)), None)


def read_request(kind: type[ModelT], body: dict[str, Any]) -> ModelT:
    """Validate a body and return the request's fields.

    Raises:
      RequestError: 400 that names the parameter.
    """
    fields = {}
    for name, value in body.items():
        if name in kind.ignored and name not in kind.model_fields:
            continue
        if name in kind.unsupported and name not in kind.model_fields:
            what, harmless = kind.unsupported[name]
            if value is not None and not any(
                type(value) is type(same) and value == same for same in harmless
            ):
                raise unsupported(name, what)
            continue
        fields[name] = value
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(first_fault(error, fields), kind.model_fields) from None


def _refusal(fault: FieldFault, fields: Iterable[str]) -> RequestError:
    # A name made up by the client may be as long as its body.
    param = fault.param[:MAX_ECHO] or None
    if fault.kind == "unsupported":
        return unsupported(param or "", fault.message)
    if fault.kind == "missing":
        return http_error(400, f"{param} is required", param)
    if fault.kind == "extra_forbidden":
        meant = _meant(param or "", fields)
        advice = f"; did you mean {meant}?" if meant else ""
        return http_error(400, f"{echo(param)} is not a parameter of this endpoint{advice}", param)
    if fault.kind == "value_error":
        return http_error(400, f"{param} {fault.message}", param)
    return http_error(400, f"{param} {fault.message}; it is {echo(fault.value)}", param)

"""What a request may hold: names, types and ranges.

Each name falls into one of four classes: applied (a field here), accepted without effect
(IGNORED), refused by name (UNSUPPORTED, unless it asks for what happens anyway), or unknown.
Unknown names are extensions of other servers or mistakes: HTTP endpoints ignore them and name them
in the answer's `x-triolet-ignored`; with `strict_requests` they are refused.
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
"""Of a conversation, put into other words before others may run: some take 10 µs."""
MAX_PARTS: Final = 1024
"""Of one message: what people attach are a few files."""
MAX_DETOKENIZED: Final = 1 << 18
"""The longest contexts of models that are served; most have fewer."""


def _stop(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if texts is None:
        return ()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if len(texts) > MAX_STOP_STRINGS:
        raise ValueError(f"may hold at most {MAX_STOP_STRINGS} strings")
    if not all(0 < len(text) <= MAX_STOP_CHARS for text in texts):
        raise ValueError(f"strings must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(texts)


StopStrings = Annotated[tuple[str, ...], BeforeValidator(_stop, json_schema_input_type=fields.Stop)]
"""One string or several, which end the text before the first that occurs."""


def _logit_bias(value: object) -> object:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"must be an object of at most {MAX_LOGIT_BIAS} token ids")
    pairs = []
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"the key {echo(key)} is no token id")
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
    # Thrice through the list in C, which takes a third of the time of once in Python.
    are_ints = set(map(type, value)) <= {int}
    if not are_ints or (value and (min(value) < 0 or max(value) > MAX_INT)):  # type: ignore[type-var,operator]
        raise ValueError("token ids must be integers from 0 on")
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
    """Return the text of a message's content: a string, or parts that are all text."""
    if not isinstance(value, list):
        return value
    if len(value) > MAX_PARTS:
        raise ValueError(f"may have at most {MAX_PARTS} parts")
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
            raise ValueError("a text part must hold a text")
        texts.append(text)
    return "".join(texts)


class StrictModel(StrictFields):
    """The fields of a request, or of a part of one.

    Attributes:
      ignored: names that this endpoint accepts without effect.
      unsupported: names that it refuses (see UNSUPPORTED).
      skipped_tools: types of tools that it leaves out.
      kinds: all of them, by name.
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
    """Return the calls of a turn.

    Raises:
      ValueError: it is not the model's turn.
    """
    if calls and info.data.get("role") != "assistant":
        raise ValueError("may only be in the role assistant")
    return calls


class Message(StrictModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    # Of the tool whose result the turn is; templates are not told the names of others.
    name: str | None = None
    # What the turn's model thought; newer clients call it `reasoning`.
    reasoning: Annotated[
        str | None, Field(validation_alias=AliasChoices("reasoning_content", "reasoning"))
    ] = None
    # Behind the calls, which may stand in its place.
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
    Field(description="Send the answer piece by piece, as server-sent events; default: false."),
]
ThinkingBudget = Annotated[
    Annotated[int, Field(ge=0, le=MAX_INT)] | None,
    Field(description="Most tokens of reasoning before the answer; default: no bound."),
]


class ServiceFields(StrictModel):
    """How early a request runs."""

    priority: Annotated[int, Field(ge=-100, le=100)] | None = Field(
        default=None, description="Order among your own requests: lower runs earlier; default: 0."
    )
    service_tier: fields.ServiceTier | None = Field(
        default=None, description="Class of service; auto, default and scale leave it to the plan."
    )


class CommonSamplingFields(StrictModel):
    """What every API calls the same of sampling."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, description="Randomness; 0 takes the likeliest token; default: the model's."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None,
        description="Sample from the likeliest tokens up to this share; default: the model's.",
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = Field(
        default=None,
        description="Sample from so many likeliest tokens; 0, -1: all; default: the model's.",
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None,
        description="Leave out tokens below this share of the likeliest; default: the model's.",
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        default=None, description="Lower the score of tokens that have occurred; default: 0."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        default=None, description="Lower scores by how often tokens have occurred; default: 0."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        default=None,
        description="Make sampling repeatable: same request, same tokens; default: random.",
    )
    stop: StopStrings = Field(
        default=(), description="Texts that end the answer and are left out of it; default: none."
    )


class SamplingFields(CommonSamplingFields):
    """What decides the next token and the end."""

    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(
        default=None,
        description="Divide the score of tokens that have occurred; default: the model's.",
    )
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        BeforeValidator(_logit_bias, json_schema_input_type=fields.LogitBias),
    ] = Field(
        default=(),
        description="Numbers to add to the scores of tokens, by token id; default: none.",
    )
    stop_token_ids: Annotated[
        tuple[int, ...], BeforeValidator(_token_ids, json_schema_input_type=fields.StopTokenIds)
    ] = Field(default=(), description="Token ids that end the answer; default: none.")
    ignore_eos: bool | None = Field(
        default=None, description="Go on after the model's end tokens; default: false."
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        default=None,
        description="Length before which the answer cannot end, in tokens; default: 0.",
    )


CacheSalt = Annotated[str, Field(min_length=1, max_length=256)] | None
"""Requests with different salts share no KV, so that the time of an answer does not tell whether
another client has asked the same."""


ResponseCacheUse = Literal["allow", "refresh"] | None
"""Whether an answer that was given before will do, or shall be replaced; else it is computed and
not kept. Where the server keeps no answers it makes no difference."""


class CacheFields(StrictModel):
    """What earlier work may be used again."""

    cache_salt: CacheSalt = Field(
        default=None,
        description="Share the prompt cache only with requests of this salt; default: none.",
    )
    response_cache: ResponseCacheUse = Field(
        default=None,
        description="Take an answer given before, or refresh it; default: compute, keep none.",
    )


class StreamOptions(StrictModel):
    """How a stream is written."""

    include_usage: bool | None = None
    # Every chunk carries the counts so far; an extension of vLLM's that benchmark clients send.
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationFields(SamplingFields, ConstraintFields, CacheFields, ServiceFields):
    """What chat and plain completions have in common."""

    model: ServedName = None
    n: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Answers to each prompt; default: 1."
    )
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None,
        description="Longest answer, in tokens; default: what fits (/v1/completions: 16).",
    )
    stream: Stream = None
    stream_options: StreamOptions | None = Field(
        default=None, description="What a stream holds beside the answer, such as token counts."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Leave special tokens out of the text; default: true."
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Keep the text that ended the answer; default: false."
    )
    return_token_ids: bool | None = Field(
        default=None, description="Add the answer's token ids; default: false."
    )


def shared_fields(request: StrictModel, but: Collection[str]) -> dict[str, Any]:
    """Return the fields of another API's request that chats call the same, but for some."""
    names = GenerationFields.model_fields.keys() & type(request).model_fields.keys() - set(but)
    return {name: getattr(request, name) for name in names}


class TemplateSwitches(TypedDict, total=False):
    """What of a chat template a client may switch: names that templates in the wild agree on."""

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
"""How much a model should reason. `none` turns it off; the others are told to templates that read
them, and are hints elsewhere."""


class ChatRequest(GenerationFields, ToolFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] = Field(
        description="The conversation, oldest turn first."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None, description="Newer name of max_tokens, which counts before it."
    )
    logprobs: bool | None = Field(
        default=None, description="Add the log probability of each token; default: false."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None,
        description="Likeliest tokens to list at each place; needs logprobs; default: 0.",
    )
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Open the assistant's turn at the end of the prompt; default: true.",
    )
    continue_final_message: bool | None = Field(
        default=None, description="Continue the last message, the assistant's; default: false."
    )
    chat_template_kwargs: TemplateKwargs = None
    reasoning_effort: Effort | None = Field(
        default=None, description="How much to reason; none turns it off; default: the template's."
    )
    thinking_token_budget: ThinkingBudget = None

    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        **UNSUPPORTED,
        "add_special_tokens": ("special tokens beside those of the chat template", (False,)),
        "echo": ("repeating the last message", (False,)),
    }


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[
        tuple[Prompt, ...], BeforeValidator(read_prompts, json_schema_input_type=fields.Prompts)
    ] = Field(description="A text or token ids to continue, or a list of either.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = Field(
        default=None,
        description="Likeliest tokens to list at each place; default: no log probabilities.",
    )
    echo: bool | None = Field(
        default=None, description="Put the prompt in front of its completion; default: false."
    )

    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        **UNSUPPORTED,
        "add_special_tokens": ("a prompt without special tokens (send token ids)", (True,)),
    }


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt, or messages as a chat would send them."""

    model: ServedName = None
    prompt: str | None = Field(default=None, description="Text to tokenize; send this or messages.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = Field(
        default=None, description="Conversation to tokenize as a chat would; send this or prompt."
    )
    add_special_tokens: bool = Field(
        default=True, description="Add the tokenizer's special tokens to prompt; default: true."
    )
    add_generation_prompt: bool = Field(
        default=True, description="Open the assistant's turn behind messages; default: true."
    )
    return_token_strs: bool = Field(
        default=False, description="Add each token's text; default: false."
    )


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: ServedName = None
    # One error for the list: a million bad ids would make a million of them.
    tokens: Annotated[
        tuple[int, ...],
        BeforeValidator(partial(_ids_up_to, MAX_DETOKENIZED), json_schema_input_type=fields.Ids),
    ] = Field(description="Token ids to turn into text.")


ModelT = TypeVar("ModelT", bound=StrictModel)


MAX_UNKNOWN: Final = 16
"""Unknown names in one body; the extensions of all known servers together send fewer."""
EXTENSION_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TYPO_RATIO: Final = 0.8
"""Names that are so alike are one name with a typing error, or the same parameter of another
server (`max_new_tokens`): ignoring it would change the answer."""


def take_unknown(kind: type[StrictModel], body: dict[str, Any]) -> tuple[str, ...]:
    """Remove from a body what its endpoint ignores, extensions and some tools; return their names.

    A name that is a parameter of chat or completions, resembles one of this endpoint, or is no word
    stays and is refused by `read_request`: it would change the answer, or cannot be told.

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
    """Return all names that an endpoint knows; asked for with every request."""
    return _field_names(kind) | kind.ignored | kind.unsupported.keys()


def _meant(name: str, fields: Iterable[str]) -> str | None:
    """Return the parameter with a name that an unknown one resembles."""
    if not EXTENSION_NAME.fullmatch(name):
        return None  # comparing costs the product of their lengths
    return next(iter(get_close_matches(name, fields, 1, TYPO_RATIO)), None)


def read_request(kind: type[ModelT], body: dict[str, Any]) -> ModelT:
    """Return a request's fields.

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
    # A name that the client made up may be as long as its body.
    param = fault.param[:MAX_ECHO] or None
    if fault.kind == "unsupported":
        return unsupported(param or "", fault.message)
    if fault.kind == "missing":
        return http_error(400, f"{param} is required", param)
    if fault.kind == "extra_forbidden":
        meant = _meant(param or "", fields)
        advice = f"; is {meant} meant?" if meant else ""
        return http_error(400, f"{echo(param)} is no parameter of this endpoint{advice}", param)
    if fault.kind == "value_error":
        return http_error(400, f"{param} {fault.message}", param)
    return http_error(400, f"{param} {fault.message}; it is {echo(fault.value)}", param)

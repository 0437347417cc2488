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
    Fault,
    StrictFields,
    ToolCall,
    ToolFields,
    first_fault,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from triolet.errors import RequestError


MAX_MESSAGES: Final = 4096
MAX_DETOKENIZED: Final = 1_000_000

IGNORED: Final = frozenset(
    "metadata user safety_identifier service_tier verbosity prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning reasoning_effort parallel_tool_calls".split()
)
"""Bookkeeping of the client's, or hints that change no promise."""

UNSUPPORTED: Final[dict[str, tuple[str, tuple[Any, ...]]]] = {
    "tools": ("calling tools", ([],)),
    "tool_choice": ("calling tools", ("none", "auto")),
    "functions": ("calling functions", ([],)),
    "function_call": ("calling functions", ("none", "auto")),
    "guided_decoding_backend": ("choosing what constrains output", ("auto", "guidance")),
    "guided_whitespace_pattern": ("choosing the whitespace of JSON", ()),
    "structural_tag": ("a structural tag", ()),
    "grammar": ("this name (it is structured_outputs.grammar)", ("",)),
    "regex": ("this name (it is structured_outputs.regex)", ()),
    "modalities": ("a modality other than text", (["text"],)),
    "audio": ("audio", ()),
    "prediction": ("predicted output", ()),
    "moderation": ("moderation", ()),
    "web_search_options": ("web search", ()),
    "store": ("storing completions", (False,)),
    "best_of": ("best_of other than 1", (1,)),
    "use_beam_search": ("beam search", (False,)),
    "suffix": ("a suffix", ("",)),
    "prompt_logprobs": ("logprobs of the prompt", ()),
    "continue_final_message": ("continuing the last message", (False,)),
    "chat_template": ("a chat template in the request (it comes with the model)", ()),
    "background": ("answering in the background", (False,)),
    "conversation": ("a stored conversation", ()),
    "context_management": ("compaction", ([],)),
    "max_tool_calls": ("calling tools", ()),
    "truncation": ("truncating the input", ("disabled",)),
    "generate": ("a request without an answer", (True,)),
    # Extensions of vLLM, SGLang and llama.cpp that change what is generated or how it is written.
    "adaptive_target": ("adaptive sampling", (-1, -1.0)),
    "allowed_token_ids": ("a list of allowed tokens", ([],)),
    "bad_words": ("forbidden words", ([],)),
    "custom_logit_processor": ("a processor of logits", ()),
    "documents": ("documents beside the messages", ([],)),
    "dry_multiplier": ("DRY sampling", (0, 0.0)),
    "dynatemp_range": ("dynamic temperature", (0, 0.0)),
    "early_stopping": ("beam search", (False,)),
    "ebnf": ("this name (it is structured_outputs.grammar)", ()),
    "generation_prompt": ("another opening of the assistant's turn", ("",)),
    "id_slot": ("choosing a slot", (-1,)),
    "image_data": ("images", ([],)),
    "input_ids": ("a prompt of token ids beside messages (see POST /v1/completions)", ()),
    "input_embeds": ("a prompt of vectors", ()),
    "json_schema": ("this name (it is response_format or structured_outputs.json)", ()),
    "length_penalty": ("beam search", (1, 1.0)),
    "logits_processors": ("processors of logits", ([],)),
    "logprob_token_ids": ("logprobs of tokens by their ids", ()),
    "lora": ("this name (an adapter is part of model, as MODEL:ADAPTER)", ([],)),
    "lora_path": ("this name (an adapter is part of model, as MODEL:ADAPTER)", ()),
    "mirostat": ("mirostat sampling", (0,)),
    "n_cmpl": ("this name (it is n)", (1,)),
    "n_indent": ("a least indentation", (0,)),
    "n_predict": ("this name (it is max_tokens)", (-1,)),
    "n_probs": ("this name (it is logprobs)", (0,)),
    "prompt_embeds": ("a prompt of vectors", ()),
    "repeat_penalty": ("this name (it is repetition_penalty)", (1, 1.0)),
    "repetition_detection": ("an end at repeated tokens", ()),
    "return_hidden_states": ("hidden states in the answer", (False,)),
    "return_prompt_text": ("the prompt in the answer", (False,)),
    "return_prompt_token_ids": ("the prompt in the answer (see POST /tokenize)", (False,)),
    "return_tokens": ("this name (it is return_token_ids)", (False,)),
    "return_tokens_as_token_ids": ("this form of tokens (see return_token_ids)", (False,)),
    "samplers": ("an order of samplers", ()),
    "stop_regex": ("an expression that ends the text", ()),
    "top_n_sigma": ("top-n-sigma sampling", (-1, -1.0, 0, 0.0)),
    "truncate_prompt_tokens": ("truncating the prompt", ()),
    "typical_p": ("typical sampling", (1, 1.0)),
    "watermarking": ("a watermark", (False,)),
    "xtc_probability": ("XTC sampling", (0, 0.0)),
}
"""By name: what it would be, and the values that ask for nothing more than happens anyway."""

EXTENSIONS: Final = frozenset(
    # vLLM
    "ec_transfer_params include_reasoning kv_transfer_params media_io_kwargs mm_processor_kwargs "
    "request_id return_mm_kwargs return_token_offsets routed_experts_prompt_start session_id "
    "spaces_between_special_tokens truncation_side vllm_xargs "
    # SGLang
    "bootstrap_host bootstrap_port bootstrap_room custom_params data_parallel_rank "
    "disagg_prefill_dp_rank extra_key images_config max_dynamic_patch min_dynamic_patch "
    "ngram_corpus_id no_stop_trim rid return_cached_tokens_details return_meta_info "
    "return_routed_experts routed_dp_rank routed_experts_start_len separate_reasoning "
    "session_params stream_reasoning use_audio_in_video "
    # llama.cpp
    "adaptive_decay backend_sampling cache_prompt chat_format chat_parser dry_allowed_length "
    "dry_base dry_penalty_last_n dry_sequence_breakers dynatemp_exponent grammar_lazy min_keep "
    "mirostat_eta mirostat_tau n_cache_reuse n_discard n_keep parse_tool_calls "
    "post_sampling_probs reasoning_format repeat_last_n response_fields return_progress "
    "sse_ping_interval t_max_predict_ms timings_per_token xtc_threshold "
    # benchmark clients and routers
    "nvext provider route transforms".split()
)
"""Extensions of other servers that change no promise, or only refine what UNSUPPORTED refuses.
Metrics count them by name; every other unknown name is counted as OTHER_EXTENSION."""
OTHER_EXTENSION: Final = "other"


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
    if not all(type(item) is int and 0 <= item <= MAX_INT for item in value):
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
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError("parts must be objects with a type")
        if kind not in TEXT_PARTS:
            raise PydanticCustomError("unsupported", f"content of type {echo(kind)}")
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
    """

    ignored: ClassVar[frozenset[str]] = IGNORED
    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = UNSUPPORTED


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


class ServiceFields(StrictModel):
    """How early a request runs."""

    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    service_tier: fields.ServiceTier | None = None


class CommonSamplingFields(StrictModel):
    """What every API calls the same of sampling."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopStrings = ()


class SamplingFields(CommonSamplingFields):
    """What decides the next token and the end."""

    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[
        tuple[tuple[int, float], ...],
        BeforeValidator(_logit_bias, json_schema_input_type=fields.LogitBias),
    ] = ()
    stop_token_ids: Annotated[
        tuple[int, ...], BeforeValidator(_token_ids, json_schema_input_type=fields.StopTokenIds)
    ] = ()
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None


CacheSalt = Annotated[str, Field(min_length=1, max_length=256)] | None
"""Requests with different salts share no KV, so that the time of an answer does not tell whether
another client has asked the same."""


ResponseCacheUse = Literal["allow", "refresh"] | None
"""Whether an answer that was given before will do, or shall be replaced; else it is computed and
not kept. Where the server keeps no answers it makes no difference."""


class CacheFields(StrictModel):
    """What earlier work may be used again."""

    cache_salt: CacheSalt = None
    response_cache: ResponseCacheUse = None


class StreamOptions(StrictModel):
    """How a stream is written."""

    include_usage: bool | None = None
    # Every chunk carries the counts so far; an extension of vLLM's that benchmark clients send.
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationFields(SamplingFields, ConstraintFields, CacheFields, ServiceFields):
    """What chat and plain completions have in common."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None


def shared_fields(request: StrictModel, but: Collection[str]) -> dict[str, Any]:
    """Return the fields of another API's request that chats call the same, but for some."""
    names = GenerationFields.model_fields.keys() & type(request).model_fields.keys() - set(but)
    return {name: getattr(request, name) for name in names}


class TemplateSwitches(TypedDict, total=False):
    """What of a chat template a client may switch: names that templates in the wild agree on."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")  # type: ignore[misc]

    enable_thinking: bool
    thinking: bool


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""How much a model should reason. `none` turns it off; the others are told to templates that read
them, and are hints elsewhere."""


class ChatRequest(GenerationFields, ToolFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateSwitches | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None

    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        **UNSUPPORTED,
        "add_special_tokens": ("special tokens beside those of the chat template", (False,)),
        "echo": ("repeating the last message", (False,)),
    }


class CompletionRequest(GenerationFields):
    """POST /v1/completions."""

    prompt: Annotated[
        tuple[Prompt, ...], BeforeValidator(read_prompts, json_schema_input_type=fields.Prompts)
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None

    unsupported: ClassVar[dict[str, tuple[str, tuple[Any, ...]]]] = {
        **UNSUPPORTED,
        "add_special_tokens": ("a prompt without special tokens (send token ids)", (True,)),
    }


class TokenizeRequest(StrictModel):
    """POST /tokenize: a prompt, or messages as a chat would send them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(StrictModel):
    """POST /detokenize."""

    model: str | None = None
    # One error for the list: a million bad ids would make a million of them.
    tokens: Annotated[
        tuple[int, ...],
        BeforeValidator(partial(_ids_up_to, MAX_DETOKENIZED), json_schema_input_type=fields.Ids),
    ]


ModelT = TypeVar("ModelT", bound=StrictModel)


MAX_UNKNOWN: Final = 16
"""Unknown names in one body; the extensions of all known servers together send fewer."""
_EXTENSION_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TYPO_RATIO: Final = 0.8
"""Names that are so alike are one name with a typing error, or the same parameter of another
server (`max_new_tokens`): ignoring it would change the answer."""


def take_unknown(kind: type[StrictModel], body: dict[str, Any]) -> tuple[str, ...]:
    """Remove from a body the extensions that its endpoint does not know; return their names.

    A name that is a parameter of chat or completions, resembles one of this endpoint, or is no word
    stays and is refused by `read_request`: it would change the answer, or cannot be told.

    Raises:
      RequestError: 400, there are more than MAX_UNKNOWN.
    """
    unknown = body.keys() - _known_names(kind)
    if not unknown:
        return ()
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
            or (_EXTENSION_NAME.fullmatch(name) and name not in others and not _meant(name, fields))
        )
    )
    for name in names:
        del body[name]
    return names


def _field_names(kind: type[StrictModel]) -> frozenset[str]:
    return frozenset(info.alias or name for name, info in kind.model_fields.items())


@cache
def _known_names(kind: type[StrictModel]) -> frozenset[str]:
    """Return all names that an endpoint knows; asked for with every request."""
    return _field_names(kind) | kind.ignored | kind.unsupported.keys()


def _meant(name: str, fields: Iterable[str]) -> str | None:
    """Return the parameter with a name that an unknown one resembles."""
    if not _EXTENSION_NAME.fullmatch(name):
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


def _refusal(fault: Fault, fields: Iterable[str]) -> RequestError:
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

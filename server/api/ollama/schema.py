"""Request schemas of Ollama's endpoints, and model names with Ollama's tags; the only tag here is
`latest`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from ..fields import MAX_TOOLS, Penalty, Tool
from ..schemas import (
    MAX_INT,
    MAX_MESSAGES,
    CommonSamplingFields,
    ServiceFields,
    StrictModel,
    assistant_calls,
)

if TYPE_CHECKING:
    from ..served_models import ModelTable, ServedModel

TAG: Final = ":latest"


def untagged(name: str, models: ModelTable) -> str:
    """Return a model's name without the tag, unless a model has the whole as its name."""
    return name if models.is_listed(name) else name.removesuffix(TAG)


def listed_names(model: ServedModel) -> list[str]:
    """Return every name of a model with a tag, as Ollama lists it."""
    return [name if ":" in name else name + TAG for name in model.names]


MAX_MODEL_CHARS: Final = 256
Unsupported = dict[str, tuple[str, tuple[Any, ...]]]

_NOTHING: Final[Unsupported] = {}
_SHARED: Final[Unsupported] = {
    "images": ("images (describe them in prompt)", ([],)),
    "logprobs": ("logprobs in this API (use /v1/chat/completions)", (False,)),
    "top_logprobs": ("logprobs in this API (use /v1/chat/completions)", (0,)),
}
LOAD_OPTIONS: Final = frozenset(
    "embedding_only f16_kv logits_all low_vram main_gpu mirostat_eta mirostat_tau num_batch "
    "num_gpu num_keep num_thread numa penalize_newline repeat_last_n use_mlock use_mmap "
    "vocab_only".split()
)
"""Options that configure model loading or only refine another option; reported as ignored in the
`x-triolet-ignored` header."""

NO_EFFECT: Final = "Accepted, but has no effect."
MODEL: Final = "Name of a served model, with or without :latest."
_Name = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
ModelName = Annotated[_Name, Field(description=MODEL)]
KeepAlive = Annotated[float | str | None, Field(description=NO_EFFECT)]
"""How long to keep the model loaded; it always stays loaded."""
Think = bool | Literal["low", "medium", "high", "max"] | None


def _no_images(value: object) -> object:
    if value not in (None, []):
        raise ValueError("are not supported by this server (describe them in content)")
    return None


NoImages = Annotated[
    None,
    BeforeValidator(
        _no_images, json_schema_input_type=Annotated[list[Any], Field(max_length=0)] | None
    ),
]


class OllamaModel(StrictModel):
    """Fields of a request or of a part of one."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Unsupported] = _NOTHING


def _listed(schema: dict[str, Any]) -> None:
    """List the fields without effect. Other unknown names are ignored unless they look like
    mistakes."""
    schema["additionalProperties"] = False
    schema["properties"] |= {name: {"description": NO_EFFECT} for name in sorted(LOAD_OPTIONS)}


class OllamaOptions(OllamaModel, CommonSamplingFields):
    """Sampling and length options. `num_predict` -1 and -2 mean as many tokens as fit; a `seed` of
    -1 means a random seed."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_listed)

    repeat_penalty: Penalty = Field(
        default=None,
        description="Divide the logits of tokens that have occurred; default: the model's.",
    )
    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT)] | None = Field(
        default=None,
        description="Maximum number of output tokens, cut to what fits; -1, -2: all that fits.",
    )
    num_ctx: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        default=None,
        description="No effect: the model sets the context; auto picks a model with at least this.",
    )
    # Accepted only with values that change nothing.
    mirostat: Annotated[int, Field(ge=0, le=0)] | None = None
    tfs_z: Annotated[float, Field(ge=1, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = None


Options = Annotated[
    OllamaOptions | None,
    Field(description="Sampling and length, such as temperature and num_predict."),
]


class OllamaCalled(OllamaModel):
    """A called function."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: dict[str, Any]


class OllamaCall(OllamaModel):
    """A tool call in an earlier assistant turn."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    function: OllamaCalled


class OllamaTurn(OllamaModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NoImages = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    tool_name: str | None = None

    @field_validator("tool_calls")
    @classmethod
    def _are_the_models(
        cls, calls: list[OllamaCall] | None, info: ValidationInfo
    ) -> list[OllamaCall] | None:
        return assistant_calls(calls, info)


class AnyRequest(OllamaModel, ServiceFields):
    """Fields shared by all text requests."""

    unsupported: ClassVar[Unsupported] = _SHARED

    model: ModelName
    stream: bool | None = Field(
        default=None, description="Stream the answer as lines of JSON; default: true."
    )
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        default=None, description="Output format: json, or a JSON Schema; default: text."
    )
    options: Options = None
    keep_alive: KeepAlive = None
    think: Think = Field(
        default=None,
        description="Turn reasoning on or off, or set its effort; default: the template's.",
    )


class OllamaChat(AnyRequest):
    """The body of POST /api/chat."""

    messages: Annotated[list[OllamaTurn], Field(max_length=MAX_MESSAGES)] | None = Field(
        default=None,
        description="The conversation, oldest turn first; without it, nothing is generated.",
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call; default: none."
    )


class OllamaGenerate(AnyRequest):
    """The body of POST /api/generate."""

    unsupported: ClassVar[Unsupported] = _SHARED | {
        "context": ("a context of token ids (use raw with the whole prompt)", ([],)),
        "suffix": ("a suffix (put it into prompt, as the model expects it)", ("",)),
        "template": ("a template in the request (it comes with the model)", ("",)),
    }

    prompt: str | None = Field(
        default=None, description="The prompt; without it, nothing is generated."
    )
    system: str | None = Field(
        default=None, description="System prompt, not with raw; default: none."
    )
    raw: bool | None = Field(
        default=None, description="Send prompt without the chat template; default: false."
    )


Inputs = str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)]


class OllamaEmbed(OllamaModel):
    """The body of POST /api/embed."""

    model: ModelName
    input: Inputs = Field(description="A text or a list of texts; one embedding each.")
    truncate: bool | None = Field(
        default=None, description="Truncate inputs that are too long; default: true."
    )
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None, description="Number of dimensions to return; default: all."
    )
    options: Options = None
    keep_alive: KeepAlive = None


class OllamaEmbeddings(OllamaModel):
    """The body of POST /api/embeddings, the older form."""

    model: ModelName
    prompt: str | None = Field(default=None, description="Text to embed.")
    options: Options = None
    keep_alive: KeepAlive = None


class OllamaShow(OllamaModel):
    """The body of POST /api/show."""

    ignored: ClassVar[frozenset[str]] = frozenset({"options", "system", "template", "verbose"})

    model: _Name | None = Field(default=None, description=MODEL)
    name: _Name | None = Field(default=None, description="Older name of model.")

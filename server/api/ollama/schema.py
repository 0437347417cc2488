"""What may be asked of Ollama's endpoints, as types for validation and for the OpenAPI document,
and names of models as its clients write them: with a tag, which is `latest` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from ..fields import MAX_TOOLS, Tool
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
    """Return a model's name without the tag, unless a model is called so by the whole."""
    return name if models.is_listed(name) else name.removesuffix(TAG)


def listed_names(model: ServedModel) -> list[str]:
    """Return every name of a model as it is listed: with a tag."""
    return [name if ":" in name else name + TAG for name in model.names]


MAX_MODEL_CHARS: Final = 256
Unsupported = dict[str, tuple[str, tuple[Any, ...]]]

_NOTHING: Final[Unsupported] = {}
_SHARED: Final[Unsupported] = {
    "images": ("images (describe them in prompt)", ([],)),
    "logprobs": ("logprobs in this API (they are in /v1/chat/completions)", (False,)),
    "top_logprobs": ("logprobs in this API (they are in /v1/chat/completions)", (0,)),
}
LOAD_OPTIONS: Final = frozenset(
    "embedding_only f16_kv logits_all low_vram main_gpu mirostat_eta mirostat_tau num_batch "
    "num_gpu num_keep num_thread numa penalize_newline repeat_last_n use_mlock use_mmap "
    "vocab_only".split()
)
"""Options that load a model, or only refine another; the model is loaded already. Named as ignored
in the answer's `x-triolet-ignored`."""

NO_EFFECT: Final = "Accepted without effect."
MODEL: Final = "Name of a served model, with or without :latest."
_Name = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]
ModelName = Annotated[_Name, Field(description=MODEL)]
KeepAlive = Annotated[float | str | None, Field(description=NO_EFFECT)]
"""How long the model should stay loaded; it always does."""
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
    """The fields of a request, or of a part of one."""

    ignored: ClassVar[frozenset[str]] = frozenset()
    unsupported: ClassVar[Unsupported] = _NOTHING


def _listed(schema: dict[str, Any]) -> None:
    """Name what has no effect. Other names are ignored too, unless they look like mistakes."""
    schema["additionalProperties"] = False
    schema["properties"] |= {name: {"description": NO_EFFECT} for name in sorted(LOAD_OPTIONS)}


class OllamaOptions(OllamaModel, CommonSamplingFields):
    """What decides the next token and the end. -1 and -2 of `num_predict` are as many as fit; a
    `seed` of -1 is a new one."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_listed)

    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = Field(
        default=None,
        description="Divide the score of tokens that have occurred; default: the model's.",
    )
    num_predict: Annotated[int, Field(ge=-2, le=MAX_INT)] | None = Field(
        default=None,
        description="Longest answer, in tokens, cut to what fits; -1, -2 and default: what fits.",
    )
    num_ctx: Annotated[int, Field(ge=0, le=MAX_INT)] | None = Field(
        default=None,
        description="Accepted without effect: the context is the model's. auto looks for as much.",
    )
    # Served only where they change nothing.
    mirostat: Annotated[int, Field(ge=0, le=0)] | None = None
    tfs_z: Annotated[float, Field(ge=1, le=1)] | None = None
    typical_p: Annotated[float, Field(ge=1, le=1)] | None = None


Options = Annotated[
    OllamaOptions | None,
    Field(description="Sampling and length, such as temperature and num_predict."),
]


class OllamaCalled(OllamaModel):
    """What the model has called."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: dict[str, Any]


class OllamaCall(OllamaModel):
    """A call in an earlier turn of the model's."""

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
    """What all requests for text have in common."""

    unsupported: ClassVar[Unsupported] = _SHARED

    model: ModelName
    stream: bool | None = Field(
        default=None, description="Send the answer piece by piece, as lines of JSON; default: true."
    )
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        default=None, description="Form of the answer: json, or a JSON Schema; default: text."
    )
    options: Options = None
    keep_alive: KeepAlive = None
    think: Think = Field(
        default=None, description="Reasoning on or off, or how much; default: the template's."
    )


class OllamaChat(AnyRequest):
    """POST /api/chat."""

    messages: Annotated[list[OllamaTurn], Field(max_length=MAX_MESSAGES)] | None = Field(
        default=None,
        description="The conversation, oldest turn first; without it nothing is answered.",
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call; default: none."
    )


class OllamaGenerate(AnyRequest):
    """POST /api/generate."""

    unsupported: ClassVar[Unsupported] = _SHARED | {
        "context": ("a context of token ids (it is raw with the whole prompt)", ([],)),
        "suffix": ("a suffix (write it into prompt, as the model expects it)", ("",)),
        "template": ("a template in the request (it comes with the model)", ("",)),
    }

    prompt: str | None = Field(
        default=None, description="Text to answer; without it nothing is answered."
    )
    system: str | None = Field(
        default=None, description="System text in front of prompt, unless raw; default: none."
    )
    raw: bool | None = Field(
        default=None, description="Send prompt as it is, without the chat template; default: false."
    )


Inputs = str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(fail_fast=True)]


class OllamaEmbed(OllamaModel):
    """POST /api/embed."""

    model: ModelName
    input: Inputs = Field(description="A text, or a list of texts; each gets a vector.")
    truncate: bool | None = Field(
        default=None, description="Cut an input that is too long at its end; default: true."
    )
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None, description="Keep so many numbers of each vector; default: all."
    )
    options: Options = None
    keep_alive: KeepAlive = None


class OllamaEmbeddings(OllamaModel):
    """POST /api/embeddings, the older form."""

    model: ModelName
    prompt: str | None = Field(default=None, description="Text that gets a vector.")
    options: Options = None
    keep_alive: KeepAlive = None


class OllamaShow(OllamaModel):
    """POST /api/show."""

    ignored: ClassVar[frozenset[str]] = frozenset({"options", "system", "template", "verbose"})

    model: _Name | None = Field(default=None, description=MODEL)
    name: _Name | None = Field(default=None, description="Older name of model.")

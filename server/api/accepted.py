"""What clients may write where a field takes more forms than it keeps, as types.

Validators of schemas.py read these forms; from the types the OpenAPI document describes them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from triolet.sampling import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS

MAX_STOP_STRINGS: Final = 16
MAX_STOP_CHARS: Final = 64
MAX_INT: Final = 2**31 - 1


MAX_METADATA: Final = 16
Metadata: TypeAlias = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=MAX_METADATA),
]
"""What a client notes beside its request; it comes back as it is."""


class TextPart(TypedDict):
    """A part of a message's content."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]

    type: Literal["text", "input_text", "output_text"]
    text: str


ServiceTier: TypeAlias = Literal["auto", "default", "flex", "priority", "scale"]
"""What the API calls classes; those that are none of ours leave the choice to the plan."""
Content: TypeAlias = str | list[TextPart]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop: TypeAlias = (
    _StopString | Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)] | None
)
_Bias = Annotated[float, Field(ge=-100, le=100)]
_IdAsKey = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
LogitBias: TypeAlias = Annotated[dict[_IdAsKey, _Bias], Field(max_length=MAX_LOGIT_BIAS)] | None
_Id = Annotated[int, Field(ge=0, le=MAX_INT)]
Ids: TypeAlias = list[_Id]
StopTokenIds: TypeAlias = Annotated[list[_Id], Field(max_length=MAX_STOP_TOKEN_IDS)] | None
_Text = Annotated[str, Field(min_length=1)]
_Prompt = Annotated[list[_Id], Field(min_length=1)]
Prompts: TypeAlias = (
    _Text
    | _Prompt
    | Annotated[list[_Text], Field(min_length=1)]
    | Annotated[list[_Prompt], Field(min_length=1)]
)

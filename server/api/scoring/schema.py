"""What may be asked of rankings (Cohere's and Jina's words) and scores (vLLM's)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from .. import accepted  # noqa: TC001 (pydantic reads it)
from ..schemas import IGNORED, MAX_INT, StrictModel

Text = Annotated[str, Field(min_length=1)]


class RankedDocument(TypedDict):
    """A document as an object; what else it holds is not read."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]

    text: Text


def _text(value: object) -> object:
    return value.get("text") if isinstance(value, dict) else value


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ScoringFields(StrictModel):
    """What both have in common."""

    ignored: ClassVar[frozenset[str]] = IGNORED | {"normalize", "embedding_type", "rank_fields"}

    model: str | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    service_tier: accepted.ServiceTier | None = None


class RerankRequest(ScoringFields):
    """POST /v1/rerank, /v2/rerank and /rerank."""

    query: Text
    documents: Annotated[
        list[
            Annotated[
                str,
                BeforeValidator(_text, json_schema_input_type=Text | RankedDocument),
                Field(min_length=1),
            ]
        ],
        Field(min_length=1),
    ]
    top_n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    return_documents: bool | None = None


class ScoreRequest(ScoringFields):
    """POST /v1/score and /score: one text with each of several, or pairs."""

    text_1: Annotated[
        list[Text],
        BeforeValidator(_texts, json_schema_input_type=Text | list[Text]),
        Field(min_length=1),
    ]
    text_2: Annotated[
        list[Text],
        BeforeValidator(_texts, json_schema_input_type=Text | list[Text]),
        Field(min_length=1),
    ]

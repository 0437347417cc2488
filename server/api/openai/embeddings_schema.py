"""Request schemas of embeddings, reranking and scores."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from .. import fields
from ..schemas import IGNORED, MAX_INT, Prompt, ServedName, ServiceFields, read_prompts


class EmbeddingFields(ServiceFields):
    """The body of POST /v1/embeddings."""

    input: Annotated[
        tuple[Prompt, ...], BeforeValidator(read_prompts, json_schema_input_type=fields.Prompts)
    ] = Field(description="A text or token ids, or a list of either; one embedding each.")
    model: ServedName = None
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None,
        description="float (default) for numbers, base64 for encoded little-endian fp32.",
    )
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None, description="Number of dimensions to return; default: all."
    )


Text = Annotated[str, Field(min_length=1)]


class RankedDocument(TypedDict):
    """A document as an object; other keys are ignored."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]

    text: Text


def _text(value: object) -> object:
    return value.get("text") if isinstance(value, dict) else value


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ScoringFields(ServiceFields):
    """Fields shared by reranking and scores."""

    ignored: ClassVar[frozenset[str]] = IGNORED | {"normalize", "embedding_type", "rank_fields"}

    model: ServedName = None


class RerankRequest(ScoringFields):
    """The body of POST /v1/rerank, /v2/rerank and /rerank."""

    query: Text = Field(description="Text to compare the documents with.")
    documents: Annotated[
        list[
            Annotated[
                str,
                BeforeValidator(_text, json_schema_input_type=Text | RankedDocument),
                Field(min_length=1),
            ]
        ],
        Field(min_length=1, fail_fast=True),
    ] = Field(description="Texts to rank, or objects with text.")
    top_n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None, description="Maximum number of documents to return, best first; default: all."
    )
    return_documents: bool | None = Field(
        default=None, description="Return the documents' texts; default: true, at /v2/rerank false."
    )


Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]


class ScoreRequest(ScoringFields):
    """The body of POST /v1/score and /score: one text and several others, or pairs."""

    text_1: Annotated[Texts, BeforeValidator(_texts, json_schema_input_type=Text | Texts)] = Field(
        description="A text, or several to pair with those of text_2."
    )
    text_2: Annotated[Texts, BeforeValidator(_texts, json_schema_input_type=Text | Texts)] = Field(
        description="Texts to compare with text_1, or with their counterparts in it."
    )

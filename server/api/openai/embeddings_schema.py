"""What may be asked of embeddings, rankings and scores: names, types, ranges."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from .. import fields
from ..schemas import IGNORED, MAX_INT, Prompt, ServedName, ServiceFields, read_prompts


class EmbeddingFields(ServiceFields):
    """POST /v1/embeddings."""

    input: Annotated[
        tuple[Prompt, ...], BeforeValidator(read_prompts, json_schema_input_type=fields.Prompts)
    ] = Field(description="A text or token ids, or a list of either; each gets a vector.")
    model: ServedName = None
    encoding_format: Literal["float", "base64"] | None = Field(
        default=None, description="Numbers (float, default), or little-endian fp32 as base64."
    )
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None, description="Keep so many numbers of each vector; default: all."
    )


Text = Annotated[str, Field(min_length=1)]


class RankedDocument(TypedDict):
    """A document as an object; what else it holds is not read."""

    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]

    text: Text


def _text(value: object) -> object:
    return value.get("text") if isinstance(value, dict) else value


def _texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


class ScoringFields(ServiceFields):
    """What both have in common."""

    ignored: ClassVar[frozenset[str]] = IGNORED | {"normalize", "embedding_type", "rank_fields"}

    model: ServedName = None


class RerankRequest(ScoringFields):
    """POST /v1/rerank, /v2/rerank and /rerank."""

    query: Text = Field(description="Text that the documents are compared with.")
    documents: Annotated[
        list[
            Annotated[
                str,
                BeforeValidator(_text, json_schema_input_type=Text | RankedDocument),
                Field(min_length=1),
            ]
        ],
        Field(min_length=1, fail_fast=True),
    ] = Field(description="Texts to order, or objects with text.")
    top_n: Annotated[int, Field(ge=1, le=MAX_INT)] | None = Field(
        default=None, description="Most documents in the answer, nearest first; default: all."
    )
    return_documents: bool | None = Field(
        default=None, description="Add the documents' texts; default: true, at /v2/rerank false."
    )


Texts = Annotated[list[Text], Field(min_length=1, fail_fast=True)]


class ScoreRequest(ScoringFields):
    """POST /v1/score and /score: one text with each of several, or pairs."""

    text_1: Annotated[Texts, BeforeValidator(_texts, json_schema_input_type=Text | Texts)] = Field(
        description="A text, or several to pair with those of text_2."
    )
    text_2: Annotated[Texts, BeforeValidator(_texts, json_schema_input_type=Text | Texts)] = Field(
        description="Texts to compare with text_1, one by one or each in its pair."
    )

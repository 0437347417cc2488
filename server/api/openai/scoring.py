"""What may be asked of rankings (Cohere's and Jina's words) and scores (vLLM's)."""

from __future__ import annotations

import math
from operator import itemgetter, mul
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import trio
from pydantic import BeforeValidator, ConfigDict, Field
from quart import request
from typing_extensions import TypedDict

from triolet.errors import invalid_request

from .. import fields  # noqa: TC001 (pydantic reads it)
from ..body import current_scope, read_fields
from ..errors import params_called
from ..generate import head, json_response
from ..schemas import IGNORED, MAX_INT, StrictModel
from .embeddings import EmbeddingFields, embed, numbers_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quart import Response

    from ..services import Services


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
    service_tier: fields.ServiceTier | None = None


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


COHERE: Final = "/v2/rerank"
"""Answers hold no documents here unless they are asked for; at Jina's path they do by default."""


async def rerank(services: Services) -> Response:
    """Order documents by how near they are to a query."""
    fields = await read_fields(RerankRequest, services)
    _check_count(len(fields.documents), "documents", services)
    texts = fields.documents
    names = {fields.query: "query"}
    for index, text in enumerate(texts):
        names.setdefault(text, f"documents.{index}")
    with params_called({"input": "documents"}):
        pairs = [(fields.query, text) for text in texts]
        scores, num_tokens = await _scores(pairs, names, fields, services)
    ranked = sorted(enumerate(scores), key=itemgetter(1), reverse=True)[: fields.top_n]
    shows = fields.return_documents
    shows = request.path != COHERE if shows is None else shows
    results = []
    for index, score in ranked:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        results.append(result | ({"document": {"text": texts[index]}} if shows else {}))
    return json_response(
        {
            "id": f"rerank-{current_scope().request_id.hex()}",
            "model": services.config.model_name,
            "results": results,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "meta": {
                "api_version": {"version": "2" if request.path == COHERE else "1"},
                "tokens": {"input_tokens": num_tokens},
            },
        }
    )


async def score(services: Services) -> Response:
    """Return how near texts are: one with each of several, or each with the other of its pair."""
    fields = await read_fields(ScoreRequest, services)
    first, second = fields.text_1, fields.text_2
    count = max(len(first), len(second))
    _check_count(count, "text_1" if len(first) == count else "text_2", services)
    if len(first) not in (1, count) or len(second) not in (1, count):
        raise invalid_request(
            f"has {len(second)} texts and text_1 {len(first)}; allowed: as many, or one", "text_2"
        )
    names: dict[str, str] = {}
    for name, given in (("text_1", first), ("text_2", second)):
        for index, text in enumerate(given):
            names.setdefault(text, name if len(given) == 1 else f"{name}.{index}")
    with params_called({"input": "text_2"}):
        pairs = zip(first * (count // len(first)), second * (count // len(second)), strict=True)
        scores, num_tokens = await _scores(list(pairs), names, fields, services)
    return json_response(
        head("list", "score", services)
        | {
            "data": [
                {"index": index, "object": "score", "score": one}
                for index, one in enumerate(scores)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _check_count(count: int, param: str, services: Services) -> None:
    most = services.config.embedding.max_documents
    if count > most:
        raise invalid_request(f"has {count} texts; at most {most} are taken at once", param)


async def _scores(
    pairs: Sequence[tuple[str, str]],
    names: Mapping[str, str],
    fields: ScoringFields,
    services: Services,
) -> tuple[list[float], int]:
    """Return the cosine of each pair, and how many tokens were computed.

    Args:
      pairs: of texts.
      names: of the parameter that each of the texts came in first.
      fields: what else is asked for.
      services: what it works with.
    """
    texts = tuple(names)
    asked = EmbeddingFields.model_construct(
        input=texts,
        model=fields.model,
        priority=fields.priority,
        service_tier=fields.service_tier,
    )
    vectors = await embed(asked, services, names=tuple(names.values()))
    numbers: dict[str, tuple[float, ...]] = {}
    lengths: dict[str, float] = {}
    for text, vector in zip(texts, vectors.found, strict=True):
        numbers[text] = numbers_of(vector)
        lengths[text] = math.hypot(*numbers[text])
        await trio.lowlevel.checkpoint()
    scores = []
    for one, other in pairs:
        product, length = sum(map(mul, numbers[one], numbers[other])), lengths[one] * lengths[other]
        scores.append(product / length if length else 0.0)
        await trio.lowlevel.checkpoint()
    return scores, vectors.num_tokens

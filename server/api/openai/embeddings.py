"""POST /v1/embeddings, reranking (Cohere's and Jina's APIs) and scores (vLLM's API)."""

from __future__ import annotations

import math
import struct
from operator import itemgetter, mul
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import trio
from quart import Response, request

from triolet.errors import draining, invalid_request
from triolet.ids import new_request_id
from triolet.pooling import VectorForm

from ...contract.generation import input_request
from ...tenants.quotas import AskedTokens
from ...tenants.tenancy import current_tenant
from ..body import current_scope, deadline_s, read_fields, shown_request_id
from ..errors import params_called
from ..generate import head, json_response
from ..limits import check_input, current_scheduling, renew_tenant, reserve_for
from ..sampling import check_ids
from ..stream import StreamBody
from ..versions import assigned_version, named_model
from .embeddings_schema import EmbeddingFields, RerankRequest, ScoreRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..schemas import Prompt
    from ..served_models import ServedModel
    from ..services import Services
    from .embeddings_schema import ScoringFields


PARAM: Final = "input"


class Vectors(NamedTuple):
    """The embeddings of some inputs.

    Attributes:
      found: little-endian fp32, in the inputs' order.
      num_tokens: total tokens of all inputs.
      model: the model that computed them.
    """

    found: Sequence[bytes]
    num_tokens: int
    model: ServedModel


async def embeddings(services: Services) -> Response:
    """Return the embeddings of one or more inputs."""
    fields = await read_fields(EmbeddingFields, services)
    check_count(fields.input, services)
    vectors = await embed(fields, services)
    pieces = await _body(vectors, fields)
    return Response(
        Pieces(pieces),
        content_type="application/json",
        headers={"content-length": str(sum(map(len, pieces)))},
    )


def check_count(inputs: Sequence[object], services: Services) -> None:
    """Raise RequestError (400) for too many inputs."""
    if len(inputs) > (most := services.config.embedding.max_inputs):
        raise invalid_request(f"must be at most {most} inputs", PARAM)


async def embed(
    fields: EmbeddingFields,
    services: Services,
    *,
    is_cut: bool = False,
    names: Sequence[str] = (),
) -> Vectors:
    """Compute the embeddings of some inputs, charged to the tenant.

    Args:
      fields: the request; the caller limits the number of inputs.
      services: the server's parts.
      is_cut: whether to truncate an input that is too long instead of refusing it.
      names: the parameter of each input, for errors; empty for `input`.

    Raises:
      RequestError: it is refused, or an embedding could not be computed.
    """
    if services.state.is_draining:
        raise draining()
    model = named_model(fields.model, services)
    current_scheduling(fields.service_tier)
    form = _form(fields, model)
    inputs = await _input_ids(fields.input, model, names, is_cut=is_cut)
    live, within_s = current_scope(), deadline_s(model.config)
    renew_tenant(services.tenancy)
    scheduling = current_scheduling(fields.service_tier, services.quotas.store.num_servers)
    client_request_id, assigned = shown_request_id(), assigned_version(model)
    requests = [
        input_request(
            request_id=new_request_id(),
            input_ids=ids,
            form=form,
            deadline_s=within_s,
            priority=fields.priority or 0,
            client_request_id=client_request_id,
            scheduling=scheduling,
            adapter=model.adapter_key,
            assigned=None if index else assigned,  # evidence counts requests, not inputs
        )
        for index, ids in enumerate(inputs)
    ]
    asked = [
        AskedTokens(one.request_id, len(one.prompt_ids), 0, model.base_name) for one in requests
    ]
    with await reserve_for(asked, services):
        run = model.fleet.embed(requests)
        live.hold(run)
        try:
            return Vectors(await run.vectors(), sum(map(len, inputs)), model)
        finally:
            for one in requests[len(run.inputs) :]:
                services.quotas.discard(one.request_id)


def _form(fields: EmbeddingFields, served: ServedModel) -> VectorForm:
    """Return the embedding format of a request, from the model's settings and `dimensions`."""
    model = served.embedding
    if model.objection:
        raise invalid_request(
            f"model {served.name} cannot compute embeddings: {model.objection}", "model"
        )
    dimensions = fields.dimensions or 0
    if 0 < model.size < dimensions:
        raise invalid_request(
            f"is {dimensions}; embeddings of model {served.name} have {model.size} dimensions",
            "dimensions",
        )
    return VectorForm(model.pooling, dimensions, model.is_normalized)


async def _input_ids(
    inputs: Sequence[Prompt], model: ServedModel, names: Sequence[str], *, is_cut: bool
) -> list[tuple[int, ...]]:
    """Return the tokens of each input, limited for each input and in total."""
    most_tokens = model.config.embedding.max_request_tokens
    longest, plan = model.embedding.max_input_tokens, current_tenant().plan
    most = model.fleet.max_model_len if longest is None else longest
    if plan.max_context_tokens is not None:
        most = min(most, plan.max_context_tokens)
    params = names or [PARAM] * len(inputs)
    texts = [
        (one, param) for one, param in zip(inputs, params, strict=True) if isinstance(one, str)
    ]
    encoded = iter(
        await model.text.encode_each(
            [text for text, _ in texts],
            params=[param for _, param in texts],
            max_tokens=most if is_cut else None,
        )
    )
    found: list[tuple[int, ...]] = []
    num_tokens = 0
    for at, (one, param) in enumerate(zip(inputs, params, strict=True)):
        what = param if names else f"input {at}"
        if isinstance(one, str):
            ids = next(encoded)
        else:
            ids = one[:most] if is_cut else one
            check_ids(ids, model, param)
        if not ids:
            raise invalid_request(f"{what} has no tokens", param)
        if not is_cut and longest is not None and len(ids) > longest:
            raise invalid_request(
                f"{what} has {len(ids)} tokens; model {model.name} takes at most {longest}",
                param,
                "context_length_exceeded",
            )
        check_input(len(ids), plan, what, param)
        num_tokens += len(ids)
        if num_tokens > most_tokens:
            raise invalid_request(
                f"all inputs together must have at most {most_tokens} tokens", PARAM
            )
        found.append(ids)
    return found


def numbers_of(vector: bytes) -> tuple[float, ...]:
    """Return an embedding's numbers."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


VECTORS_PER_PIECE: Final = 8
"""Embeddings per write. With 4,096 dimensions, encoding them takes five milliseconds."""


async def _body(vectors: Vectors, fields: EmbeddingFields) -> list[bytes]:
    """Return the response in pieces. Thousands of embeddings can take a hundred megabytes, and
    encoding or writing them at once would block all streams."""
    is_base64 = fields.encoding_format == "base64"
    pieces = [b'{"object":"list","data":']
    for first in range(0, len(vectors.found), VECTORS_PER_PIECE):
        items = [
            # Bytes are encoded as base64.
            {"object": "embedding", "index": at, "embedding": one if is_base64 else numbers_of(one)}
            for at, one in enumerate(vectors.found[first : first + VECTORS_PER_PIECE], first)
        ]
        pieces.append((b"," if first else b"[") + msgspec.json.encode(items)[1:-1])
        await trio.lowlevel.checkpoint()
    usage = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
    end = {"model": vectors.model.name, "usage": usage}
    return [*pieces, b"]," + msgspec.json.encode(end)[1:]]


class Pieces(StreamBody):
    """Writes a complete response piece by piece."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)

    async def __anext__(self) -> bytes:
        for piece in self._pieces:
            return piece
        raise StopAsyncIteration


COHERE: Final = "/v2/rerank"
"""Cohere's path, where responses contain documents only on request; at Jina's they do by
default."""


async def rerank(services: Services) -> Response:
    """Rank documents by similarity to a query."""
    fields = await read_fields(RerankRequest, services)
    _check_pairs(len(fields.documents), "documents", services)
    texts = fields.documents
    names = {fields.query: "query"}
    for index, text in enumerate(texts):
        names.setdefault(text, f"documents.{index}")
    with params_called({"input": "documents"}):
        pairs = [(fields.query, text) for text in texts]
        scores, num_tokens, model = await _scores(pairs, names, fields, services)
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
            "model": model.name,
            "results": results,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "meta": {
                "api_version": {"version": "2" if request.path == COHERE else "1"},
                "tokens": {"input_tokens": num_tokens},
            },
        }
    )


async def score(services: Services) -> Response:
    """Score the similarity of one text to several others, or of each pair of texts."""
    fields = await read_fields(ScoreRequest, services)
    first, second = fields.text_1, fields.text_2
    count = max(len(first), len(second))
    _check_pairs(count, "text_1" if len(first) == count else "text_2", services)
    if len(first) not in (1, count) or len(second) not in (1, count):
        raise invalid_request(
            f"has {len(second)} texts and text_1 {len(first)}; allowed: equally many, or one",
            "text_2",
        )
    names: dict[str, str] = {}
    for name, given in (("text_1", first), ("text_2", second)):
        for index, text in enumerate(given):
            names.setdefault(text, name if len(given) == 1 else f"{name}.{index}")
    with params_called({"input": "text_2"}):
        pairs = zip(first * (count // len(first)), second * (count // len(second)), strict=True)
        scores, num_tokens, model = await _scores(list(pairs), names, fields, services)
    return json_response(
        head("list", "score", model)
        | {
            "data": [
                {"index": index, "object": "score", "score": one}
                for index, one in enumerate(scores)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _check_pairs(count: int, param: str, services: Services) -> None:
    most = services.config.embedding.max_documents
    if count > most:
        raise invalid_request(f"has {count} texts; at most {most} are allowed", param)


async def _scores(
    pairs: Sequence[tuple[str, str]],
    names: Mapping[str, str],
    fields: ScoringFields,
    services: Services,
) -> tuple[list[float], int, ServedModel]:
    """Return the cosine similarity of each pair, the number of tokens computed, and the model.

    Args:
      pairs: pairs of texts.
      names: for each text, the parameter in which it occurred first.
      fields: the request.
      services: the server's parts.
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
    return scores, vectors.num_tokens, vectors.model

"""What a request for vectors may hold: names, types and ranges. Knows no tokens and no workers."""

from __future__ import annotations

import base64
import struct
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
import trio
from pydantic import BeforeValidator, Field
from quart import Response

from triolet.errors import draining, invalid_request
from triolet.ids import new_request_id
from triolet.pooling import VectorForm

from ...contract.generation import input_request
from ...tenants.quotas import Asked
from ...tenants.tenancy import current_tenant
from .. import fields
from ..body import check_model, current_scope, deadline_s, read_fields, shown_request_id
from ..claims import current_scheduling, renew_tenant
from ..generate import check_input
from ..quota import reserve_for
from ..sampling import unknown_token
from ..schemas import MAX_INT, Prompt, StrictModel, read_prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..schemas import Prompt
    from ..services import Services


class EmbeddingFields(StrictModel):
    """POST /v1/embeddings."""

    input: Annotated[
        tuple[Prompt, ...], BeforeValidator(read_prompts, json_schema_input_type=fields.Prompts)
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    service_tier: fields.ServiceTier | None = None


PARAM: Final = "input"


class Vectors(NamedTuple):
    """What became of some inputs.

    Attributes:
      found: little-endian fp32, in the inputs' order.
      num_tokens: of all inputs together.
    """

    found: Sequence[bytes]
    num_tokens: int


async def embeddings(services: Services) -> Response:
    """Return the vectors of one or several inputs."""
    fields = await read_fields(EmbeddingFields, services)
    if len(fields.input) > (most := services.config.embedding.max_inputs):
        raise invalid_request(f"at most {most} inputs are taken at once", PARAM)
    vectors = await embed(fields, services)
    body = await _body(vectors, services, fields)
    return Response(body, content_type="application/json")


async def embed(
    fields: EmbeddingFields,
    services: Services,
    *,
    is_cut: bool = False,
    names: Sequence[str] = (),
) -> Vectors:
    """Return the vectors of some inputs, charged to the tenant.

    Args:
      fields: what is asked for; the caller bounds the number of inputs.
      services: what it works with.
      is_cut: an input that is too long is cut at its end instead of being refused.
      names: of the parameters that the inputs came in, for errors; `input` for none.

    Raises:
      RequestError: it is refused, or a vector could not be computed.
    """
    if services.state.is_draining:
        raise draining()
    check_model(fields.model, services.config)
    current_scheduling(fields.service_tier)
    form = _form(fields, services)
    inputs = await _input_ids(fields.input, services, names, is_cut=is_cut)
    live, within_s = current_scope(), deadline_s(services.config)
    renew_tenant(services.tenancy)
    scheduling = current_scheduling(fields.service_tier, services.quotas.store.num_servers)
    requests = [
        input_request(
            request_id=new_request_id(),
            input_ids=ids,
            form=form,
            deadline_s=within_s,
            priority=fields.priority or 0,
            client_request_id=shown_request_id(),
            scheduling=scheduling,
        )
        for ids in inputs
    ]
    asked = [Asked(one.request_id, len(one.prompt_ids), 0) for one in requests]
    with await reserve_for(asked, services):
        run = services.fleet.embed(requests)
        live.hold(run)
    return Vectors(await run.vectors(), sum(map(len, inputs)))


def _form(fields: EmbeddingFields, services: Services) -> VectorForm:
    """Return what the vectors are to be like: what the model says, and as long as asked for."""
    model = services.embedding
    if model.objection:
        raise invalid_request(f"this model makes no vectors here: {model.objection}", "model")
    dimensions = fields.dimensions
    if dimensions is not None and dimensions != model.size:
        if model.size and dimensions > model.size:
            raise invalid_request(f"this model's vectors have {model.size} numbers", "dimensions")
        if model.sizes is not None and dimensions not in model.sizes:
            allowed = ", ".join(map(str, sorted({*model.sizes, model.size})))
            raise invalid_request(f"this model's vectors may have {allowed} numbers", "dimensions")
    cut = dimensions if dimensions is not None and dimensions != model.size else 0
    return VectorForm(model.pooling, cut, model.is_normalized)


async def _input_ids(
    inputs: Sequence[Prompt], services: Services, names: Sequence[str], *, is_cut: bool
) -> list[tuple[int, ...]]:
    """Return the tokens of each input, bounded one by one and in all."""
    most_tokens = services.config.embedding.max_request_tokens
    longest, plan = services.embedding.max_input_tokens, current_tenant().plan
    most = services.fleet.max_model_len if longest is None else longest
    if plan.max_context_tokens is not None:
        most = min(most, plan.max_context_tokens)
    found: list[tuple[int, ...]] = []
    num_tokens = 0
    for at, one in enumerate(inputs):
        param = names[at] if names else PARAM
        what = param if names else f"input {at}"
        if isinstance(one, str):
            kept = most if is_cut else None
            ids = tuple(await services.text.encode(one, param=param, max_tokens=kept))
        else:
            ids = one[:most] if is_cut else one
            if (largest := max(ids)) >= services.text.vocab_size:
                raise unknown_token(largest, services.text.vocab_size, param)
        if not ids:
            raise invalid_request(f"{what} has no tokens", param)
        if not is_cut and longest is not None and len(ids) > longest:
            raise invalid_request(
                f"{what} has {len(ids)} tokens; this model takes at most {longest}",
                param,
                "context_length_exceeded",
            )
        check_input(len(ids), plan, what, param)
        num_tokens += len(ids)
        if num_tokens > most_tokens:
            raise invalid_request(f"all inputs together may have {most_tokens} tokens", PARAM)
        found.append(ids)
    return found


def numbers_of(vector: bytes) -> tuple[float, ...]:
    """Return a vector's numbers."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


async def _body(vectors: Vectors, services: Services, fields: EmbeddingFields) -> bytes:
    """Return the answer. Vector by vector: thousands at once would hold up everybody's streams."""
    items = []
    for index, vector in enumerate(vectors.found):
        value: Any = base64.b64encode(vector).decode()
        if fields.encoding_format != "base64":
            value = numbers_of(vector)
        item = {"object": "embedding", "index": index, "embedding": value}
        items.append(msgspec.json.encode(item))
        await trio.lowlevel.checkpoint()
    document = {
        "object": "list",
        "data": [msgspec.Raw(item) for item in items],
        "model": services.config.model_name,
        "usage": {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens},
    }
    return msgspec.json.encode(document)

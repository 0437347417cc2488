"""POST /api/embed and the older /api/embeddings: inputs in, vectors out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import trio

from triolet.errors import invalid_request

from ..embeddings import embed, numbers_of
from ..errors import params_called
from ..generate import json_response
from ..intake import live_request
from ..schemas_embeddings import EmbeddingFields
from .answers import NS_PER_S
from .chat import check_options, read_body
from .names import served_model
from .schema import OllamaEmbed, OllamaEmbeddings, OllamaOptions

if TYPE_CHECKING:
    from quart import Response

    from ..ports import Services


async def embed_inputs(services: Services) -> Response:
    """Return the vectors of one or several inputs; of none, none."""
    fields = await read_body(OllamaEmbed, services)
    model = served_model(fields.model, services.config)
    check_options(fields.options or OllamaOptions(), services)
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    if len(texts) > (most := services.config.embedding.max_inputs):
        raise invalid_request(f"at most {most} inputs are taken at once", "input")
    if texts == [""]:
        texts = []
    lists: list[msgspec.Raw] = []
    num_tokens = 0
    if texts:
        asked = EmbeddingFields.model_construct(
            input=tuple(texts), model=model, dimensions=fields.dimensions
        )
        vectors = await embed(asked, services, is_cut=fields.truncate is not False)
        num_tokens = vectors.num_tokens
        for vector in vectors.found:
            lists.append(msgspec.Raw(msgspec.json.encode(numbers_of(vector))))
            await trio.lowlevel.checkpoint()
    took_s = trio.current_time() - live_request().began_at
    return json_response(
        {
            "model": services.config.model_name,
            "embeddings": lists,
            "total_duration": round(took_s * NS_PER_S),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }
    )


async def embed_prompt(services: Services) -> Response:
    """Return the vector of one prompt; of an empty one, an empty one."""
    fields = await read_body(OllamaEmbeddings, services)
    model = served_model(fields.model, services.config)
    check_options(fields.options or OllamaOptions(), services)
    if not fields.prompt:
        return json_response({"embedding": []})
    asked = EmbeddingFields.model_construct(input=(fields.prompt,), model=model)
    with params_called({"input": "prompt"}):
        vectors = await embed(asked, services, is_cut=True)
    return json_response({"embedding": numbers_of(vectors.found[0])})

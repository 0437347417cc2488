"""The served model, and its tokenizer for clients that count."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from triolet.config import ANY_MODEL
from triolet.errors import invalid_request

from ..body import check_model, read_fields
from ..generate import json_response
from ..sampling import unknown_token
from ..schemas import DetokenizeRequest, TokenizeRequest
from .chat import read_turns

if TYPE_CHECKING:
    from quart import Response

    from ..services import Services


def list_models(services: Services) -> Response:
    """Return the model under each of its names."""
    config = services.config
    names = (config.model_name, *(n for n in config.model_aliases if n != ANY_MODEL))
    cards = [_card(name, services) for name in names]
    page = {"first_id": names[0], "last_id": names[-1], "has_more": False}
    return json_response({"object": "list", "data": cards, **page})


def show_model(services: Services, name: str) -> Response:
    """Return one model by name."""
    check_model(name, services.config)
    return json_response(_card(name, services))


async def tokenize(services: Services) -> Response:
    """Return the ids of a prompt, or of messages as a chat would send them."""
    fields = await read_fields(TokenizeRequest, services)
    check_model(fields.model, services.config)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid_request("send either prompt or messages", "prompt")
    if fields.messages is not None:
        prompt = await services.text.render_chat(
            await read_turns(fields.messages, services),
            add_generation_prompt=fields.add_generation_prompt,
        )
        ids = await services.text.encode(prompt, add_special_tokens=False, param="messages")
    else:
        ids = await services.text.encode(
            fields.prompt or "", add_special_tokens=fields.add_special_tokens
        )
    document: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": services.fleet.max_model_len,
        "tokens": list(ids),
    }
    if fields.return_token_strs:
        document["token_strs"] = await services.text.decode_each(ids)
    return json_response(document)


async def detokenize(services: Services) -> Response:
    """Return the text of some ids."""
    fields = await read_fields(DetokenizeRequest, services)
    check_model(fields.model, services.config)
    largest = max(fields.tokens, default=0)
    if largest >= services.text.vocab_size:
        raise unknown_token(largest, services.text.vocab_size, "tokens")
    text = await services.text.decode(fields.tokens, skip_special_tokens=False, param="tokens")
    return json_response({"prompt": text})


def _card(name: str, services: Services) -> dict[str, Any]:
    """Return a model in the words of OpenAI's API and, from `type` on, in those of Anthropic's."""
    return {
        "id": name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "triolet",
        "max_model_len": services.fleet.max_model_len,
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(services.started_at, UTC).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        ),
        "page": services.page_words.document(),
    }

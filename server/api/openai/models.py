"""Handlers that list the served models, and tokenize and detokenize text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from triolet.config import AUTO
from triolet.errors import invalid_request

from ..auto import context_on, current_ladder, is_auto
from ..body import read_fields
from ..generate import json_response
from ..ladder import NEAREST
from ..sampling import check_ids
from ..schemas import DetokenizeRequest, TokenizeRequest
from ..versions import named_model
from .chat import turns

if TYPE_CHECKING:
    from quart import Response

    from ..served_models import ServedModel
    from ..services import Services


def list_models(services: Services) -> Response:
    """List every model under each of its names."""
    cards = [
        _card(name, model, services) for model in services.models.listed for name in model.names
    ]
    if is_auto(AUTO, services):
        cards.append(_auto_card(services))
    page = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
    return json_response({"object": "list", "data": cards, **page})


def show_model(services: Services, name: str) -> Response:
    """Return one model by name."""
    if is_auto(name, services):
        return json_response(_auto_card(services))
    return json_response(_card(name, named_model(name, services), services))


async def tokenize(services: Services) -> Response:
    """Tokenize a prompt, or messages as a chat would render them."""
    fields = await read_fields(TokenizeRequest, services)
    model = named_model(fields.model, services)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid_request("the request must have either prompt or messages", "prompt")
    if fields.messages is not None:
        prompt = await model.text.render_chat(
            await turns(fields.messages),
            add_generation_prompt=fields.add_generation_prompt,
        )
        ids = await model.text.encode(prompt, add_special_tokens=False, param="messages")
    else:
        ids = await model.text.encode(
            fields.prompt or "", add_special_tokens=fields.add_special_tokens
        )
    document: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": model.fleet.max_model_len,
        "tokens": list(ids),
    }
    if fields.return_token_strs:
        document["token_strs"] = await model.text.decode_each([[i] for i in ids])
    return json_response(document)


async def detokenize(services: Services) -> Response:
    """Detokenize token ids."""
    fields = await read_fields(DetokenizeRequest, services)
    model = named_model(fields.model, services)
    most = model.fleet.max_model_len
    if len(fields.tokens) > most:
        raise invalid_request(
            f"has more ids than a context holds ({most}); send them in parts", "tokens"
        )
    check_ids(fields.tokens, model, "tokens")
    text = await model.text.decode(fields.tokens, skip_special_tokens=False, param="tokens")
    return json_response({"prompt": text})


def _auto_card(services: Services) -> dict[str, Any]:
    """Return the listing of `auto`: the longest context of the tenant's ladder, and the state of
    the model that is nearest to serving."""
    models = current_ladder(services)
    nearest = min(models, key=lambda model: list(NEAREST).index(model.state))
    return _card(AUTO, models[0], services) | {
        "root": AUTO,
        "max_model_len": max(context_on(model, services) for model in models),
        "digest": None,
        "state": nearest.state.value,
        "ladder": [model.name for model in models],
    }


def _card(name: str, model: ServedModel, services: Services) -> dict[str, Any]:
    """Return a model's fields in OpenAI's API and, from `type` on, in Anthropic's."""
    return {
        "id": name,
        "object": "model",
        "created": services.started_at,
        "owned_by": "triolet",
        "root": model.base_name,
        "parent": None if model.adapter is None else model.base_name,
        "max_model_len": model.fleet.max_model_len,
        "digest": model.digest or None,
        "state": model.state.value,
        "tools": model.text.tools.value,
        "type": "model",
        "display_name": name,
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(services.started_at, UTC).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        ),
        "page": model.page_words.document(),
    }

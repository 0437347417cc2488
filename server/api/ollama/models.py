"""GET /api/tags, /api/ps, /api/version and POST /api/show (Ollama), and the refusal of endpoints
that manage models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from triolet.errors import RequestError, invalid_request

from ...text.tool_forms.generic import ToolSupport
from ..body import read_fields
from ..generate import json_response
from ..served_models import DIGEST
from ..versions import named_model
from .chat import stamp
from .schema import OllamaShow, listed_names, untagged

if TYPE_CHECKING:
    from quart import Response

    from ...text.model_files import ModelCard
    from ..served_models import ServedModel
    from ..services import Services

SPOKEN: Final = "0.12.6"
"""The implemented version of Ollama's API. Clients compare it with their minimum version."""
NEVER: Final = "9999-12-31T23:59:59Z"
"""The expiry time of a loaded model."""
_PREFIXES: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def list_tags(services: Services) -> Response:
    """List every model under each of its names."""
    return json_response(
        {"models": [_listed(one, m) for m in services.models.listed for one in listed_names(m)]}
    )


def list_running(services: Services) -> Response:
    """List the models that have workers, with their expiry time."""
    running: list[dict[str, Any]] = []
    for model in services.models.listed:
        if model.fleet.status().is_ready:
            more = {"expires_at": NEVER, "context_length": model.fleet.max_model_len}
            running += [_listed(one, model) | more for one in listed_names(model)]
    return json_response({"models": running})


def show_version(services: Services) -> Response:
    """Return the implemented version of Ollama's API."""
    del services
    return json_response({"version": SPOKEN})


async def show(services: Services) -> Response:
    """Return a model's details from its directory."""
    fields = await read_fields(OllamaShow, services)
    name = fields.model or fields.name
    if name is None:
        raise invalid_request("is required", "model")
    model = named_model(untagged(name, services.models), services)
    card, defaults = model.card, model.defaults
    parameters = {
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repeat_penalty": defaults.repetition_penalty,
        "num_ctx": model.fleet.max_model_len,
    }
    return json_response(
        {
            "modelfile": f"FROM {listed_names(model)[0]}",
            "parameters": "\n".join(f"{key} {value}" for key, value in parameters.items()),
            "template": card.template,
            "details": _details(card),
            "model_info": _info(card, model),
            "capabilities": _capabilities(model),
            "modified_at": stamp(card.modified_at),
        }
    )


def refuse(services: Services) -> Response:
    """Refuse to pull, push, create, copy or delete a model: the operator manages models."""
    what = "model" if len(services.models) == 1 else "models"
    raise RequestError(
        f"this server serves the {what} that it was started with; models cannot be pulled, pushed, "
        "created, copied or deleted here",
        status=501,
        code="not_implemented",
    )


def _listed(name: str, model: ServedModel) -> dict[str, Any]:
    card = model.card
    return {
        "name": name,
        "model": name,
        "modified_at": stamp(card.modified_at),
        "size": card.size_bytes,
        "digest": model.digest.removeprefix(DIGEST) or card.digest,
        "details": _details(card),
    }


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": card.form,
        "family": card.family,
        "families": [card.family] if card.family else [],
        "parameter_size": _shown(card.num_parameters),
        "quantization_level": card.dtype,
    }


def _info(card: ModelCard, model: ServedModel) -> dict[str, Any]:
    family = card.family or "unknown"
    return {
        "general.architecture": family,
        "general.parameter_count": card.num_parameters,
        f"{family}.context_length": model.fleet.max_model_len,
        **{f"{family}.{name}": value for name, value in card.info.items()},
    }


def _capabilities(model: ServedModel) -> list[str]:
    """Return what the model can be used for, according to its files."""
    said = {
        "completion": True,
        "tools": model.text.tools is not ToolSupport.NONE,
        "thinking": model.text.reasoner is not None,
        "embedding": not model.embedding.objection,
    }
    return [name for name, is_so in said.items() if is_so]


def _shown(count: int) -> str:
    """Return a parameter count in short form: 5.2M, 1.2B."""
    for size, prefix in _PREFIXES:
        if count >= size:
            return f"{count / size:.1f}{prefix}"
    return str(count)

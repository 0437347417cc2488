"""Bounds of this very server in the OpenAPI document: its model's names, vocabulary and context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from triolet.config import ANY_MODEL

from ..api.fields import MAX_INT
from ..api.ollama.schema import TAG
from ..jobs.batches_api import MAX_WINDOW_NUMBER, MAX_WINDOW_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..api.services import Services

Schema = dict[str, Any]

_LOGIT_BIAS_KEYS: Final = "^[0-9]{1,9}$"
_UNITS_S: Final = (("s", 1), ("m", 60), ("h", 3600), ("d", 86_400))


def up_to(most: int) -> str:
    """Return an expression for the decimal numbers from 1 to `most`, without leading zeros."""
    digits = str(most)
    size = len(digits)
    parts = [f"[1-9][0-9]{{0,{size - 2}}}"] if size > 1 else []
    for place, digit in enumerate(digits):
        lowest = 1 if place == 0 else 0
        if int(digit) > lowest:
            rest = f"[0-9]{{{size - place - 1}}}" if place < size - 1 else ""
            parts.append(f"{digits[:place]}[{lowest}-{int(digit) - 1}]{rest}")
    return f"(?:{'|'.join([*parts, digits])})"


def add_limits(schemas: dict[str, Schema], services: Services) -> None:
    """Narrow the fields whose bounds are this server's.

    Args:
      schemas: of requests, by the names of their components; changed.
      services: of the server.
    """
    names = model_names(services)
    ids = services.text.vocab_size - 1
    room = services.fleet.max_model_len - 1
    config = services.config
    for component, schema in schemas.items():
        fields = schema.get("properties", {})
        for name in ("model", "name") if component == "OllamaShow" else ("model",):
            if name in fields and names:
                _narrow(fields[name], "string", enum=_tagged(names, component))
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens"):
            if name in fields and component != "MessagesRequest":
                _narrow(fields[name], "integer", maximum=room)
        for name in ("prompt", "input", "tokens", "stop_token_ids"):
            for part in _parts(fields.get(name, {})):
                if part.get("type") == "integer" and part.get("maximum") == MAX_INT:
                    part["maximum"] = ids
        if "logit_bias" in fields:
            _narrow_bias(fields["logit_bias"], ids)
        if "n" in fields:
            _narrow(fields["n"], "integer", maximum=config.max_choices)
        if "num_ctx" in fields:
            _narrow(fields["num_ctx"], "integer", maximum=room + 1)
    _narrow_lists(schemas, services)
    if "BatchFields" in schemas:
        most = {unit: min(MAX_WINDOW_S // size, MAX_WINDOW_NUMBER) for unit, size in _UNITS_S}
        window = "|".join(up_to(number) + unit for unit, number in most.items())
        schemas["BatchFields"]["properties"]["completion_window"]["pattern"] = f"^(?:{window})$"


def model_names(services: Services) -> list[str]:
    """Return the names that requests may use; none where any will do."""
    config = services.config
    if ANY_MODEL in config.model_aliases:
        return []
    return [config.model_name, *config.model_aliases]


def _tagged(names: list[str], component: str) -> list[str]:
    if not component.startswith("Ollama"):
        return names
    return list(dict.fromkeys([*names, *(name + TAG for name in names)]))


def _narrow_bias(schema: Schema, largest: int) -> None:
    for part in _parts(schema):
        if _LOGIT_BIAS_KEYS in part.get("patternProperties", {}):
            value = part["patternProperties"].pop(_LOGIT_BIAS_KEYS)
            part["patternProperties"][f"^(?:0|{up_to(largest)})$"] = value
            part["additionalProperties"] = False


def _narrow_lists(schemas: dict[str, Schema], services: Services) -> None:
    """Bound how many prompts, inputs and documents there are, and how long those of ids."""
    config, room = services.config, services.fleet.max_model_len - 1
    longest = services.embedding.max_input_tokens or room
    for component, field, most, most_ids in (
        ("CompletionRequest", "prompt", config.max_prompts, room),
        ("EmbeddingFields", "input", config.embedding.max_inputs, longest),
        ("OllamaEmbed", "input", config.embedding.max_inputs, longest),
        ("RerankRequest", "documents", config.embedding.max_documents, longest),
        ("ScoreRequest", "text_1", config.embedding.max_documents, longest),
        ("ScoreRequest", "text_2", config.embedding.max_documents, longest),
    ):
        schema = schemas.get(component, {}).get("properties", {}).get(field, {})
        for part in _parts(schema):
            if part.get("type") == "array":
                is_ids = part["items"].get("type") == "integer"
                part["maxItems"] = most_ids if is_ids else most
    model = services.embedding
    for component in ("EmbeddingFields", "OllamaEmbed"):
        dimensions = schemas.get(component, {}).get("properties", {}).get("dimensions", {})
        if model.sizes is not None:
            sizes = sorted({*model.sizes, model.size} - {0})
            bounds: Schema = {"enum": sizes} if sizes else {"not": {}}
            _narrow(dimensions, "integer", **bounds)
        elif model.size:
            _narrow(dimensions, "integer", maximum=model.size)


def _narrow(schema: Schema, kind: str, **bounds: object) -> None:
    """Give bounds to the alternatives of one type."""
    for part in [schema, *schema.get("anyOf", ())]:
        if part.get("type") == kind:
            part |= bounds


def _parts(schema: Schema) -> Iterator[Schema]:
    """Yield a schema and all that it is made of."""
    yield schema
    for part in schema.get("anyOf", ()):
        yield from _parts(part)
    if isinstance(items := schema.get("items"), dict):
        yield from _parts(items)

"""What a request for vectors may hold: names, types and ranges. Knows no tokens and no workers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from . import accepted
from .schemas import MAX_INT, Prompt, StrictModel, read_prompts


class EmbeddingFields(StrictModel):
    """POST /v1/embeddings."""

    input: Annotated[
        tuple[Prompt, ...], BeforeValidator(read_prompts, json_schema_input_type=accepted.Prompts)
    ]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    service_tier: accepted.ServiceTier | None = None

"""Schemas of responses for the OpenAPI document.

Responses are serialized by hand for speed, so their schemas are defined here. Tests check every
real response against them.
"""

from __future__ import annotations

from typing import Any, Final

from transport.rollout_protocol import RolloutPhase

Schema = dict[str, Any]

_INT: Final[Schema] = {"type": "integer"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_TEXT: Final[Schema] = {"type": "string"}
_ANY_OBJECT: Final[Schema] = {"type": ["object", "null"]}


def _object(**properties: Schema) -> Schema:
    """Return the schema of an object with these required properties and any others."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _with_optional(schema: Schema, **properties: Schema) -> Schema:
    """Return the schema with these optional properties added."""
    return {**schema, "properties": schema["properties"] | properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def ref(name: str) -> Schema:
    """Return a reference to a component."""
    return {"$ref": f"#/components/schemas/{name}"}


_USAGE: Final = _with_optional(
    _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    completion_tokens_details=_object(reasoning_tokens=_COUNT),
)
_MODEL: Final = _object(
    id=_TEXT,
    object=_one_of("model"),
    created=_INT,
    owned_by=_TEXT,
    root=_TEXT,
    max_model_len=_COUNT,
    digest={"type": ["string", "null"]},
    state=_TEXT,
    tools=_one_of("native", "generic", "none"),
    type=_one_of("model"),
    display_name=_TEXT,
    lifecycle=_one_of("active"),
    created_at=_TEXT,
    page=_object(
        lead={"type": ["string", "null"]},
        cards=_list(_object(title=_TEXT, question=_TEXT)),
        has_chat_template={"type": "boolean"},
    ),
)
_LISTED_MODEL: Final = _with_optional(_MODEL, ladder=_list(_TEXT))

UPLOAD: Final = _object(
    purpose={**_one_of("batch"), "description": "Purpose of the file: batch."},
    file={
        "type": "string",
        "format": "binary",
        "description": "The file: one JSON request per line.",
    },
)
"""The body of a file upload, which is not parsed by a request model."""

_LIMIT: Final[Schema] = {"type": ["number", "null"]}
_TENANT_USAGE: Final = _object(
    tenant=_TEXT,
    plan=_TEXT,
    limits=_object(
        requests_per_minute=_LIMIT, tokens_per_minute=_LIMIT, max_concurrent=_LIMIT, budget=_LIMIT
    ),
    remaining=_object(requests=_LIMIT, tokens=_LIMIT),
    in_flight=_COUNT,
    this_month=_object(tokens=_COUNT, spent={"type": "number"}),
    is_shared={"type": "boolean"},
    servers=_object(counted=_COUNT, all=_COUNT),
)

_OLLAMA_DETAILS: Final = _object(
    format=_TEXT, family=_TEXT, parameter_size=_TEXT, quantization_level=_TEXT
)
_OLLAMA_END: Final[dict[str, Schema]] = {
    "done_reason": _TEXT,
    "total_duration": _COUNT,
    "load_duration": _COUNT,
    "prompt_eval_count": _COUNT,
    "prompt_eval_duration": _COUNT,
    "eval_count": _COUNT,
    "eval_duration": _COUNT,
}
_OLLAMA: Final[dict[str, Schema]] = {
    "OllamaError": _object(error=_TEXT),
    "OllamaChatAnswer": _with_optional(
        _object(
            model=_TEXT,
            created_at=_TEXT,
            message=_object(role=_one_of("assistant"), content=_TEXT),
            done={"const": True},
        ),
        **_OLLAMA_END,
    ),
    "OllamaText": _with_optional(
        _object(model=_TEXT, created_at=_TEXT, response=_TEXT, done={"const": True}),
        **_OLLAMA_END,
    ),
    "OllamaVectors": _object(
        model=_TEXT, embeddings=_list(_list({"type": "number"})), prompt_eval_count=_COUNT
    ),
    "OllamaVector": _object(embedding=_list({"type": "number"})),
    "OllamaModels": _object(
        models=_list(
            _object(name=_TEXT, model=_TEXT, size=_COUNT, digest=_TEXT, details=_OLLAMA_DETAILS)
        )
    ),
    "OllamaVersion": _object(version=_TEXT),
    "OllamaModel": _object(
        template=_TEXT,
        parameters=_TEXT,
        details=_OLLAMA_DETAILS,
        model_info={"type": "object"},
        capabilities=_list(_TEXT),
    ),
}
_TOKENS_USED: Final = _object(prompt_tokens=_COUNT, total_tokens=_COUNT)

RESULTS: Final[dict[str, Schema]] = {
    **_OLLAMA,
    "Ranking": _object(
        id=_TEXT,
        model=_TEXT,
        results=_list(
            _with_optional(
                _object(index=_COUNT, relevance_score={"type": "number"}),
                document=_object(text=_TEXT),
            )
        ),
        usage=_TOKENS_USED,
    ),
    "Scores": _object(
        id=_TEXT,
        object=_one_of("list"),
        created=_INT,
        model=_TEXT,
        data=_list(_object(index=_COUNT, object=_one_of("score"), score={"type": "number"})),
        usage=_TOKENS_USED,
    ),
    "TenantUsage": _TENANT_USAGE,
    "TenantUsageList": _object(object=_one_of("list"), data=_list(ref("TenantUsage"))),
    "Error": _object(
        error=_object(
            message=_TEXT,
            type=_TEXT,
            param={"type": ["string", "null"]},
            code={"type": ["string", "null"]},
        )
    ),
    "MessagesError": _object(
        type=_one_of("error"), error=_object(type=_TEXT, message=_TEXT), request_id=_TEXT
    ),
    "MessagesAnswer": _object(
        id=_TEXT,
        type=_one_of("message"),
        role=_one_of("assistant"),
        model=_TEXT,
        content=_list(_object(type=_TEXT)),
        stop_reason={"type": ["string", "null"]},
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT),
    ),
    "MessageTokens": _object(input_tokens=_COUNT),
    "Usage": _USAGE,
    "ChatCompletion": _with_optional(
        _object(
            id=_TEXT,
            object=_one_of("chat.completion"),
            created=_INT,
            model=_TEXT,
            choices=_list(
                _object(
                    index=_COUNT,
                    message=_with_optional(
                        _object(
                            role=_one_of("assistant"),
                            content={"type": ["string", "null"]},
                            refusal={"type": ["string", "null"]},
                        ),
                        reasoning_content=_TEXT,
                        tool_calls=_list(
                            _object(
                                id=_TEXT,
                                type=_one_of("function"),
                                function=_object(name=_TEXT, arguments=_TEXT),
                            )
                        ),
                    ),
                    logprobs=_ANY_OBJECT,
                    finish_reason=_one_of("stop", "length", "tool_calls", "content_filter"),
                )
            ),
            usage=ref("Usage"),
        ),
        system_fingerprint=_TEXT,
    ),
    "Completion": _with_optional(
        _object(
            id=_TEXT,
            object=_one_of("text_completion"),
            created=_INT,
            model=_TEXT,
            choices=_list(
                _object(
                    index=_COUNT,
                    text=_TEXT,
                    logprobs=_ANY_OBJECT,
                    finish_reason=_one_of("stop", "length", "content_filter"),
                )
            ),
            usage=ref("Usage"),
        ),
        system_fingerprint=_TEXT,
    ),
    "Response": _object(
        id=_TEXT,
        object=_one_of("response"),
        created_at=_INT,
        status=_one_of("completed", "incomplete", "failed", "cancelled"),
        model=_TEXT,
        output=_list(_object(id=_TEXT, type=_TEXT)),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "InputTokens": _object(object=_one_of("response.input_tokens"), input_tokens=_COUNT),
    "Embeddings": _object(
        object=_one_of("list"),
        data=_list(
            _object(
                object=_one_of("embedding"),
                index=_COUNT,
                embedding={"oneOf": [_list({"type": "number"}), _TEXT]},
            )
        ),
        model=_TEXT,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "File": _object(id=_TEXT, object=_one_of("file")),
    "Batch": _object(id=_TEXT, object=_one_of("batch"), status=_TEXT),
    "List": _object(object=_one_of("list"), data=_list({"type": "object"})),
    "Model": _LISTED_MODEL,
    "ModelList": _object(
        object=_one_of("list"),
        data=_list(ref("Model")),
        first_id=_TEXT,
        last_id=_TEXT,
        has_more={"type": "boolean"},
    ),
    "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT)),
    "Text": _object(prompt=_TEXT),
    "Health": _object(status=_one_of("live", "ready"), model=_TEXT, version=_TEXT),
    "Version": _object(version=_TEXT, model=_TEXT),
    "Load": _object(server_load=_COUNT, queued=_COUNT, running=_COUNT),
    "Scale": _object(workers=_list({"type": "object"})),
    "FleetAudit": _object(violations=_list({"type": "object"})),
    "FleetStatus": _object(
        queued=_COUNT,
        running=_COUNT,
        counters={"type": "object"},
        latencies={"type": "object"},
        queued_by_class={"type": "object"},
        rejected_by_code={"type": "object"},
        errors_by_status={"type": "object"},
        recent={"type": "object"},
        workers=_list({"type": "object"}),
    ),
    "FleetHistory": _object(
        object=_one_of("fleet_history"),
        sample_s={"type": "number"},
        servers=_COUNT,
        at_s=_list({"type": "number"}),
        all={"type": "object"},
        models={"type": "object"},
        tenants={"type": "object"},
        objectives={"type": "object"},
    ),
    "HistoryRows": _object(version=_TEXT, observed_s={"type": "number"}, rows={"type": "object"}),
    "RolloutList": _object(
        object=_one_of("list"),
        data=_list(
            _object(
                id=_TEXT,
                model=_TEXT,
                stable=_TEXT,
                candidate=_TEXT,
                candidate_digest=_TEXT,
                phase=_one_of(*RolloutPhase),
                step=_COUNT,
                shares=_list({"type": "number"}),
                share={"type": "number"},
                route_valid_s={"type": ["number", "null"]},
                began_at={"type": "number"},
                said=_TEXT,
                counts={"type": "object"},
                recent={"type": "object"},
                cost={"type": ["array", "null"]},
                shadow={"type": "object"},
                zones=_list(_TEXT),
                history=_list(_object(at={"type": "number"}, phase=_TEXT, step=_COUNT, said=_TEXT)),
            )
        ),
    ),
    "SloReport": _object(
        object=_one_of("slo_report"),
        observed_s={"type": "number"},
        servers=_COUNT,
        is_frozen={"type": "boolean"},
        reason=_TEXT,
        objectives=_list(
            _object(
                name=_TEXT,
                indicator=_TEXT,
                target={"type": "number"},
                freezes={"type": "boolean"},
                budget=_object(
                    minutes={"type": "number"},
                    remaining_minutes={"type": "number"},
                    is_spent={"type": "boolean"},
                ),
                burn_rates={"type": "object"},
                events={"type": "object"},
                alerts=_list(_one_of("page", "ticket")),
                pairs=_list({"type": "object"}),
                versions=_list({"type": "object"}),
            )
        ),
    ),
    "SloCounts": _object(observed_s={"type": "number"}, rows=_list({"type": "array"})),
    "Anything": {"type": "object"},
}

"""The route table, one row per route. To add a route, write its handler and a row here.

The application, access checks, limits, CORS and the OpenAPI document all read this table.
"""

from __future__ import annotations

from typing import Final

from .api.anthropic.messages import count_message_tokens, create_message
from .api.anthropic.schema import CountRequest, MessagesRequest
from .api.ollama import chat as ollama_chat
from .api.ollama import models as ollama_models
from .api.ollama.schema import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaShow,
)
from .api.openai.chat import chat_completions, completions
from .api.openai.embeddings import embeddings, rerank, score
from .api.openai.embeddings_schema import EmbeddingFields, RerankRequest, ScoreRequest
from .api.openai.models import detokenize, list_models, show_model, tokenize
from .api.openai.responses import count_input_tokens, create_response
from .api.openai.responses_schema import InputTokensRequest, ResponseRequest
from .api.openai.responses_socket import responses_socket
from .api.openai.stored_responses import delete_response, list_input_items, show_response
from .api.operations.fleet_status import (
    FLEET_USAGE,
    HISTORY,
    OWN_AUDIT,
    OWN_HISTORY,
    OWN_SLO,
    OWN_STATUS,
    OWN_USAGE,
    ROLLOUTS,
    SLO,
    fleet_audit,
    fleet_history,
    fleet_rollouts,
    fleet_slo,
    fleet_status,
    fleet_usage,
    own_audit,
    own_history,
    own_slo,
    own_status,
    own_usage,
    server_usage,
)
from .api.operations.fleet_status import PATH as STATUS
from .api.operations.pages import api_page, chat_page, dashboard, static_file
from .api.operations.probes import (
    OWN_LOAD,
    OWN_METRICS,
    live,
    load,
    metrics,
    own_load,
    own_metrics,
    ready,
    scale,
    version,
)
from .api.route import WS, Permission, Route, RouteTable
from .api.route import DocumentedOperation as Entry
from .api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .document.openapi import PATH as OPENAPI
from .document.openapi import ServedDocument
from .document.results import UPLOAD
from .jobs.endpoints import (
    cancel_batch,
    create_batch,
    delete_file,
    file_content,
    list_batches,
    list_files,
    show_batch,
    show_file,
    upload_file,
)
from .jobs.forms import BatchFields

USER, OPERATOR, NONE = Permission.USER, Permission.OPERATOR, Permission.NONE

_RANKING = Entry(
    "Text and embeddings", "Rank documents by similarity to a query.", "Ranking", RerankRequest
)
_SCORES = Entry(
    "Text and embeddings", "Score the similarity of one text to others.", "Scores", ScoreRequest
)
_REFUSAL = Entry(
    "Ollama",
    "Always refused: models are managed by the operator.",
    "OllamaError",
    status=501,
    error="Error",
)

ROWS: Final[tuple[Route, ...]] = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        USER,
        Entry("Text and embeddings", "Create a chat completion.", "ChatCompletion", ChatRequest),
        cost="tokens",
        streams=True,
        is_resumable=True,
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        USER,
        Entry(
            "Text and embeddings", "Complete one or more prompts.", "Completion", CompletionRequest
        ),
        cost="tokens",
        streams=True,
        is_resumable=True,
    ),
    Route(
        "POST",
        "/v1/embeddings",
        embeddings,
        USER,
        Entry(
            "Text and embeddings",
            "Create embeddings of one or more inputs.",
            "Embeddings",
            EmbeddingFields,
        ),
        cost="tokens",
    ),
    Route(
        "POST",
        "/v1/responses",
        create_response,
        USER,
        Entry(
            "Responses (OpenAI)",
            "Create a response. This path also accepts WebSockets.",
            "Response",
            ResponseRequest,
        ),
        cost="tokens",
        streams=True,
        is_resumable=True,
    ),
    Route(WS, "/v1/responses", responses_socket, USER, None, streams=True),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        count_input_tokens,
        USER,
        Entry(
            "Responses (OpenAI)",
            "Count the input tokens of a response request.",
            "InputTokens",
            InputTokensRequest,
        ),
        cost="request",
    ),
    Route(
        "GET",
        "/v1/responses/<response_id>",
        show_response,
        USER,
        Entry("Responses (OpenAI)", "Get a stored response.", "Response"),
    ),
    Route(
        "DELETE",
        "/v1/responses/<response_id>",
        delete_response,
        USER,
        Entry("Responses (OpenAI)", "Delete a stored response.", "Anything"),
    ),
    Route(
        "GET",
        "/v1/responses/<response_id>/input_items",
        list_input_items,
        USER,
        Entry("Responses (OpenAI)", "List the input items of a stored response.", "List"),
    ),
    Route(
        "POST",
        "/v1/messages",
        create_message,
        USER,
        Entry(
            "Messages (Anthropic)",
            "Create a message (Anthropic's Messages API).",
            "MessagesAnswer",
            MessagesRequest,
        ),
        dialect="anthropic",
        cost="tokens",
        streams=True,
        is_resumable=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_message_tokens,
        USER,
        Entry(
            "Messages (Anthropic)",
            "Count the input tokens of a message request.",
            "MessageTokens",
            CountRequest,
        ),
        dialect="anthropic",
        cost="request",
    ),
    Route(
        "POST",
        "/v1/batches",
        create_batch,
        USER,
        Entry(
            "Files and batches",
            "Create a batch: run a file of requests in the background.",
            "Batch",
            BatchFields,
        ),
        part="storage or none",
    ),
    Route(
        "POST",
        "/v1/files",
        upload_file,
        USER,
        Entry(
            "Files and batches",
            "Upload a file of requests.",
            "File",
            UPLOAD,
            media="multipart/form-data",
        ),
        part="storage",
    ),
    Route(
        "GET",
        "/v1/files",
        list_files,
        USER,
        Entry("Files and batches", "List the files.", "List"),
        part="storage",
    ),
    Route(
        "GET",
        "/v1/files/<file_id>",
        show_file,
        USER,
        Entry("Files and batches", "Get a file's description.", "File"),
        part="storage",
    ),
    Route(
        "DELETE",
        "/v1/files/<file_id>",
        delete_file,
        USER,
        Entry("Files and batches", "Delete a file.", "Anything"),
        part="storage",
    ),
    Route(
        "GET",
        "/v1/files/<file_id>/content",
        file_content,
        USER,
        Entry("Files and batches", "Download a file's content.", "application/octet-stream"),
        part="storage",
    ),
    Route(
        "GET",
        "/v1/batches",
        list_batches,
        USER,
        Entry("Files and batches", "List the batches.", "List"),
        part="storage",
    ),
    Route(
        "GET",
        "/v1/batches/<batch_id>",
        show_batch,
        USER,
        Entry("Files and batches", "Get a batch and its progress.", "Batch"),
        part="storage",
    ),
    Route(
        "POST",
        "/v1/batches/<batch_id>/cancel",
        cancel_batch,
        USER,
        Entry("Files and batches", "Cancel a batch.", "Batch"),
        part="storage",
    ),
    Route("POST", "/v1/rerank", rerank, USER, _RANKING, cost="tokens"),
    Route("POST", "/v2/rerank", rerank, USER, _RANKING, cost="tokens"),
    Route("POST", "/rerank", rerank, USER, _RANKING, cost="tokens"),
    Route("POST", "/v1/score", score, USER, _SCORES, cost="tokens"),
    Route("POST", "/score", score, USER, _SCORES, cost="tokens"),
    Route(
        "POST",
        "/api/chat",
        ollama_chat.chat,
        USER,
        Entry("Ollama", "Create a chat completion (Ollama).", "OllamaChatAnswer", OllamaChat),
        dialect="ollama",
        cost="tokens",
        streams=True,
    ),
    Route(
        "POST",
        "/api/generate",
        ollama_chat.generate,
        USER,
        Entry("Ollama", "Complete a prompt (Ollama).", "OllamaText", OllamaGenerate),
        dialect="ollama",
        cost="tokens",
        streams=True,
    ),
    Route(
        "POST",
        "/api/embed",
        ollama_chat.embed_inputs,
        USER,
        Entry(
            "Ollama",
            "Create embeddings of one or more inputs (Ollama).",
            "OllamaVectors",
            OllamaEmbed,
        ),
        dialect="ollama",
        cost="tokens",
    ),
    Route(
        "POST",
        "/api/embeddings",
        ollama_chat.embed_prompt,
        USER,
        Entry(
            "Ollama",
            "Create an embedding of one prompt (Ollama's older endpoint).",
            "OllamaVector",
            OllamaEmbeddings,
        ),
        dialect="ollama",
        cost="tokens",
    ),
    Route(
        "GET",
        "/api/tags",
        ollama_models.list_tags,
        USER,
        Entry("Ollama", "List the served models.", "OllamaModels"),
        dialect="ollama",
    ),
    Route(
        "GET",
        "/api/ps",
        ollama_models.list_running,
        USER,
        Entry("Ollama", "List the served models as loaded models.", "OllamaModels"),
        dialect="ollama",
    ),
    Route(
        "GET",
        "/api/version",
        ollama_models.show_version,
        USER,
        Entry("Ollama", "Get the implemented version of Ollama's API.", "OllamaVersion"),
        dialect="ollama",
    ),
    Route(
        "POST",
        "/api/show",
        ollama_models.show,
        USER,
        Entry("Ollama", "Get a model's details.", "OllamaModel", OllamaShow),
        dialect="ollama",
    ),
    Route("POST", "/api/pull", ollama_models.refuse, USER, _REFUSAL, dialect="ollama"),
    Route("POST", "/api/push", ollama_models.refuse, USER, _REFUSAL, dialect="ollama"),
    Route("POST", "/api/create", ollama_models.refuse, USER, _REFUSAL, dialect="ollama"),
    Route("POST", "/api/copy", ollama_models.refuse, USER, _REFUSAL, dialect="ollama"),
    Route("DELETE", "/api/delete", ollama_models.refuse, USER, _REFUSAL, dialect="ollama"),
    Route(
        "GET",
        "/v1/models",
        list_models,
        USER,
        Entry("Models and tokens", "List the served models.", "ModelList"),
    ),
    Route(
        "GET",
        "/v1/models/<path:name>",
        show_model,
        USER,
        Entry("Models and tokens", "Get a model.", "Model"),
    ),
    Route(
        "GET",
        "/v1/usage",
        own_usage,
        USER,
        Entry("Fleet", "Get the calling tenant's limits and usage.", "TenantUsage"),
    ),
    Route(
        "GET",
        FLEET_USAGE,
        fleet_usage,
        OPERATOR,
        Entry("Fleet", "Get every tenant's limits and usage, for operators.", "TenantUsageList"),
    ),
    Route(
        "GET",
        OWN_USAGE,
        server_usage,
        OPERATOR,
        Entry("Fleet", "Get the tenants' usage from one server process.", "TenantUsageList"),
    ),
    Route(
        "POST",
        "/tokenize",
        tokenize,
        USER,
        Entry("Models and tokens", "Tokenize text or messages.", "Tokens", TokenizeRequest),
        cost="request",
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        USER,
        Entry("Models and tokens", "Detokenize token ids.", "Text", DetokenizeRequest),
        cost="request",
    ),
    Route(
        "GET",
        "/health/live",
        live,
        NONE,
        Entry("Process", "Liveness: whether the process runs.", "Health"),
    ),
    Route(
        "GET",
        "/ping",
        live,
        NONE,
        Entry("Process", "Alias of /health/live.", "Health"),
    ),
    Route(
        "GET",
        "/health/ready",
        ready,
        NONE,
        Entry("Process", "Readiness: whether workers are available for requests.", "Health"),
    ),
    Route(
        "GET",
        "/health",
        ready,
        NONE,
        Entry("Process", "Alias of /health/ready.", "Health"),
    ),
    Route(
        "GET",
        "/metrics",
        metrics,
        OPERATOR,
        Entry("Fleet", "Metrics in the Prometheus text format.", "text/plain"),
    ),
    Route(
        "GET", "/version", version, USER, Entry("Process", "Get the Triolet version.", "Version")
    ),
    Route("GET", "/load", load, OPERATOR, Entry("Fleet", "Get the current load.", "Load")),
    Route(
        "GET",
        "/admin/scale",
        scale,
        OPERATOR,
        Entry("Fleet", "Get desired and present numbers of workers, for autoscalers.", "Scale"),
    ),
    Route(
        "GET",
        OWN_AUDIT,
        own_audit,
        OPERATOR,
        Entry("Fleet", "Get the audit of one server process.", "FleetAudit"),
    ),
    Route(
        "GET",
        OWN_METRICS,
        own_metrics,
        OPERATOR,
        Entry("Fleet", "Metrics of one server process.", "text/plain"),
    ),
    Route("GET", OWN_LOAD, own_load, OPERATOR, Entry("Fleet", "Get one server's load.", "Load")),
    Route(
        "GET",
        "/fleet/audit",
        fleet_audit,
        OPERATOR,
        Entry("Fleet", "List all KV blocks, leases and requests, for operators.", "FleetAudit"),
    ),
    Route(
        "GET",
        OWN_STATUS,
        own_status,
        OPERATOR,
        Entry("Fleet", "Get the fleet status from one server process.", "FleetStatus"),
    ),
    Route(
        "GET",
        STATUS,
        fleet_status,
        OPERATOR,
        Entry(
            "Fleet", "Get workers, KV blocks, queue and latencies, for operators.", "FleetStatus"
        ),
    ),
    Route(
        "GET",
        HISTORY,
        fleet_history,
        OPERATOR,
        Entry("Fleet", "Get the figures of the last hour, for operators.", "FleetHistory"),
    ),
    Route(
        "GET",
        OWN_HISTORY,
        own_history,
        OPERATOR,
        Entry("Fleet", "Get the last hour's rows from one server process.", "HistoryRows"),
    ),
    Route(
        "GET", ROLLOUTS, fleet_rollouts, OPERATOR, Entry("Fleet", "Get rollouts.", "RolloutList")
    ),
    Route(
        "GET",
        SLO,
        fleet_slo,
        OPERATOR,
        Entry("Fleet", "Get burn rates and error budgets, for operators.", "SloReport"),
    ),
    Route(
        "GET",
        OWN_SLO,
        own_slo,
        OPERATOR,
        Entry("Fleet", "Get the counts of objectives from one server process.", "SloCounts"),
    ),
    Route(
        "GET",
        OPENAPI,
        ServedDocument.answer,
        NONE,
        Entry("Pages", "This document.", "Anything"),
        is_open_to_pages=True,
        part="document",
    ),
    Route(
        "GET",
        "/",
        chat_page,
        NONE,
        Entry("Pages", "The chat page.", "text/html"),
        part="page files",
    ),
    Route(
        "GET",
        "/dashboard",
        dashboard,
        NONE,
        Entry("Pages", "The dashboard page.", "text/html"),
        part="page files",
    ),
    Route(
        "GET",
        "/docs",
        api_page,
        NONE,
        Entry("Pages", "The API documentation page.", "text/html"),
        part="page files",
    ),
    Route(
        "GET",
        "/static/<path:name>",
        static_file,
        NONE,
        Entry("Pages", "A static file of the pages.", "text/html"),
        part="page files",
    ),
)
ROUTES: Final = RouteTable(ROWS, trees=("/v1/", "/api/"))

"""The route table: one row for each route. To add a route, write its handler and its row.

The application, the checks of access, the limits, CORS and the OpenAPI document read these rows.
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
from .api.openai.embeddings import (
    EmbeddingFields,
    RerankRequest,
    ScoreRequest,
    embeddings,
    rerank,
    score,
)
from .api.openai.models import detokenize, list_models, show_model, tokenize
from .api.openai.responses import count_input_tokens, create_response
from .api.openai.responses_schema import InputTokensRequest, ResponseRequest
from .api.openai.responses_socket import responses_socket
from .api.openai.stored_responses import delete_response, list_input_items, show_response
from .api.operations.fleet_status import (
    FLEET_USAGE,
    OWN_AUDIT,
    OWN_STATUS,
    OWN_USAGE,
    fleet_audit,
    fleet_status,
    fleet_usage,
    own_audit,
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
    version,
)
from .api.route import WS, Cost, Dialect, Permission, Route, RoutePart, RouteTable
from .api.route import DocumentedOperation as Entry
from .api.schemas import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .document.openapi import PATH as OPENAPI
from .document.openapi import ServedDocument
from .document.results import UPLOAD
from .jobs.endpoints import (
    BatchFields,
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

USER, OPERATOR, NONE = Permission.USER, Permission.OPERATOR, Permission.NONE
ANTHROPIC, OLLAMA = Dialect.ANTHROPIC, Dialect.OLLAMA
TOKENS, REQUEST = Cost.TOKENS, Cost.REQUEST
STORAGE, FILES = RoutePart.STORAGE, RoutePart.PAGE_FILES
TEXTS: Final = "Text and vectors"
RESPONSES: Final = "Responses (OpenAI)"
MESSAGES: Final = "Messages (Anthropic)"
JOBS: Final = "Files and batches"
IN_OLLAMA: Final = "Ollama"
MODELS: Final = "Models and tokens"
FLEET: Final = "Fleet"
PROCESS: Final = "Process"
PAGES: Final = "Pages"
PAGE: Final = "text/html"
PLAIN: Final = "text/plain"
FORM: Final = "multipart/form-data"
LINES: Final = "application/octet-stream"
_OWN: Final = "The same of one server process."
_AS_ELSEWHERE: Final = "The same, as some orchestrators call it."

_CHAT = Entry(TEXTS, "Answer a conversation.", "ChatCompletion", ChatRequest)
_PROMPTS = Entry(TEXTS, "Continue one or several prompts.", "Completion", CompletionRequest)
_RESPONSE = Entry(
    RESPONSES,
    "Answer in the words of the Responses API; the same over a WebSocket at this path.",
    "Response",
    ResponseRequest,
)
_MESSAGE = Entry(
    MESSAGES,
    "Answer a conversation in the words of Anthropic's Messages API.",
    "MessagesAnswer",
    MessagesRequest,
)
_VECTORS = Entry(TEXTS, "Turn one or several inputs into vectors.", "Embeddings", EmbeddingFields)
_RANKING = Entry(
    TEXTS, "Order documents by how near they are to a query.", "Ranking", RerankRequest
)
_SCORES = Entry(TEXTS, "How near one text is to others.", "Scores", ScoreRequest)
_REFUSAL = Entry(
    IN_OLLAMA,
    "Always refused: the model is the server's.",
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
        _CHAT,
        cost=TOKENS,
        streams=True,
        is_resumable=True,
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        USER,
        _PROMPTS,
        cost=TOKENS,
        streams=True,
        is_resumable=True,
    ),
    Route("POST", "/v1/embeddings", embeddings, USER, _VECTORS, cost=TOKENS),
    Route(
        "POST",
        "/v1/responses",
        create_response,
        USER,
        _RESPONSE,
        cost=TOKENS,
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
            RESPONSES, "Count the tokens of such a conversation.", "InputTokens", InputTokensRequest
        ),
        cost=REQUEST,
    ),
    Route(
        "GET",
        "/v1/responses/<response_id>",
        show_response,
        USER,
        Entry(RESPONSES, "Show a stored response.", "Response"),
    ),
    Route(
        "DELETE",
        "/v1/responses/<response_id>",
        delete_response,
        USER,
        Entry(RESPONSES, "Forget a stored response.", "Anything"),
    ),
    Route(
        "GET",
        "/v1/responses/<response_id>/input_items",
        list_input_items,
        USER,
        Entry(RESPONSES, "List the items of a stored response's request.", "List"),
    ),
    Route(
        "POST",
        "/v1/messages",
        create_message,
        USER,
        _MESSAGE,
        dialect=ANTHROPIC,
        cost=TOKENS,
        streams=True,
        is_resumable=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_message_tokens,
        USER,
        Entry(MESSAGES, "Count the tokens of such a conversation.", "MessageTokens", CountRequest),
        dialect=ANTHROPIC,
        cost=REQUEST,
    ),
    Route(
        "POST",
        "/v1/batches",
        create_batch,
        USER,
        Entry(JOBS, "Answer a file of requests in the background.", "Batch", BatchFields),
        part=RoutePart.STORAGE_OR_NONE,
    ),
    Route(
        "POST",
        "/v1/files",
        upload_file,
        USER,
        Entry(JOBS, "Keep a file of requests.", "File", UPLOAD, media=FORM),
        part=STORAGE,
    ),
    Route(
        "GET", "/v1/files", list_files, USER, Entry(JOBS, "List the files.", "List"), part=STORAGE
    ),
    Route(
        "GET",
        "/v1/files/<file_id>",
        show_file,
        USER,
        Entry(JOBS, "Show a file.", "File"),
        part=STORAGE,
    ),
    Route(
        "DELETE",
        "/v1/files/<file_id>",
        delete_file,
        USER,
        Entry(JOBS, "Forget a file.", "Anything"),
        part=STORAGE,
    ),
    Route(
        "GET",
        "/v1/files/<file_id>/content",
        file_content,
        USER,
        Entry(JOBS, "What a file holds.", LINES),
        part=STORAGE,
    ),
    Route(
        "GET",
        "/v1/batches",
        list_batches,
        USER,
        Entry(JOBS, "List the batches.", "List"),
        part=STORAGE,
    ),
    Route(
        "GET",
        "/v1/batches/<batch_id>",
        show_batch,
        USER,
        Entry(JOBS, "How far a batch is.", "Batch"),
        part=STORAGE,
    ),
    Route(
        "POST",
        "/v1/batches/<batch_id>/cancel",
        cancel_batch,
        USER,
        Entry(JOBS, "End a batch.", "Batch"),
        part=STORAGE,
    ),
    Route("POST", "/v1/rerank", rerank, USER, _RANKING, cost=TOKENS),
    Route("POST", "/v2/rerank", rerank, USER, _RANKING, cost=TOKENS),
    Route("POST", "/rerank", rerank, USER, _RANKING, cost=TOKENS),
    Route("POST", "/v1/score", score, USER, _SCORES, cost=TOKENS),
    Route("POST", "/score", score, USER, _SCORES, cost=TOKENS),
    Route(
        "POST",
        "/api/chat",
        ollama_chat.chat,
        USER,
        Entry(
            IN_OLLAMA, "Answer a conversation, in Ollama's words.", "OllamaChatAnswer", OllamaChat
        ),
        dialect=OLLAMA,
        cost=TOKENS,
        streams=True,
    ),
    Route(
        "POST",
        "/api/generate",
        ollama_chat.generate,
        USER,
        Entry(IN_OLLAMA, "Continue a prompt, in Ollama's words.", "OllamaText", OllamaGenerate),
        dialect=OLLAMA,
        cost=TOKENS,
        streams=True,
    ),
    Route(
        "POST",
        "/api/embed",
        ollama_chat.embed_inputs,
        USER,
        Entry(
            IN_OLLAMA,
            "Turn one or several inputs into vectors, in Ollama's words.",
            "OllamaVectors",
            OllamaEmbed,
        ),
        dialect=OLLAMA,
        cost=TOKENS,
    ),
    Route(
        "POST",
        "/api/embeddings",
        ollama_chat.embed_prompt,
        USER,
        Entry(
            IN_OLLAMA,
            "Turn a prompt into a vector, in Ollama's older words.",
            "OllamaVector",
            OllamaEmbeddings,
        ),
        dialect=OLLAMA,
        cost=TOKENS,
    ),
    Route(
        "GET",
        "/api/tags",
        ollama_models.list_tags,
        USER,
        Entry(IN_OLLAMA, "List the served model.", "OllamaModels"),
        dialect=OLLAMA,
    ),
    Route(
        "GET",
        "/api/ps",
        ollama_models.list_running,
        USER,
        Entry(IN_OLLAMA, "The same, as a loaded one.", "OllamaModels"),
        dialect=OLLAMA,
    ),
    Route(
        "GET",
        "/api/version",
        ollama_models.show_version,
        USER,
        Entry(IN_OLLAMA, "Which release's API is spoken.", "OllamaVersion"),
        dialect=OLLAMA,
    ),
    Route(
        "POST",
        "/api/show",
        ollama_models.show,
        USER,
        Entry(IN_OLLAMA, "Show the model.", "OllamaModel", OllamaShow),
        dialect=OLLAMA,
    ),
    Route("POST", "/api/pull", ollama_models.refuse, USER, _REFUSAL, dialect=OLLAMA),
    Route("POST", "/api/push", ollama_models.refuse, USER, _REFUSAL, dialect=OLLAMA),
    Route("POST", "/api/create", ollama_models.refuse, USER, _REFUSAL, dialect=OLLAMA),
    Route("POST", "/api/copy", ollama_models.refuse, USER, _REFUSAL, dialect=OLLAMA),
    Route("DELETE", "/api/delete", ollama_models.refuse, USER, _REFUSAL, dialect=OLLAMA),
    Route(
        "GET", "/v1/models", list_models, USER, Entry(MODELS, "List the served model.", "ModelList")
    ),
    Route(
        "GET", "/v1/models/<path:name>", show_model, USER, Entry(MODELS, "Show one model.", "Model")
    ),
    Route(
        "GET",
        "/v1/usage",
        own_usage,
        USER,
        Entry(FLEET, "What a tenant may use, and has used.", "TenantUsage"),
    ),
    Route(
        "GET",
        FLEET_USAGE,
        fleet_usage,
        OPERATOR,
        Entry(FLEET, "The same of all tenants, for operators.", "TenantUsageList"),
    ),
    Route("GET", OWN_USAGE, server_usage, OPERATOR, Entry(FLEET, _OWN, "TenantUsageList")),
    Route(
        "POST",
        "/tokenize",
        tokenize,
        USER,
        Entry(MODELS, "Turn text or messages into token ids.", "Tokens", TokenizeRequest),
        cost=REQUEST,
    ),
    Route(
        "POST",
        "/detokenize",
        detokenize,
        USER,
        Entry(MODELS, "Turn token ids into text.", "Text", DetokenizeRequest),
        cost=REQUEST,
    ),
    Route("GET", "/health/live", live, NONE, Entry(PROCESS, "Whether the process runs.", "Health")),
    Route("GET", "/ping", live, NONE, Entry(PROCESS, _AS_ELSEWHERE, "Health")),
    Route(
        "GET",
        "/health/ready",
        ready,
        NONE,
        Entry(PROCESS, "Whether a request sent now has workers.", "Health"),
    ),
    Route("GET", "/health", ready, NONE, Entry(PROCESS, _AS_ELSEWHERE, "Health")),
    Route(
        "GET",
        "/metrics",
        metrics,
        OPERATOR,
        Entry(FLEET, "Everything counted, for Prometheus.", PLAIN),
    ),
    Route("GET", "/version", version, USER, Entry(PROCESS, "Which release this is.", "Version")),
    Route("GET", "/load", load, OPERATOR, Entry(FLEET, "How much is going on.", "Load")),
    Route("GET", OWN_AUDIT, own_audit, OPERATOR, Entry(FLEET, _OWN, "FleetAudit")),
    Route("GET", OWN_METRICS, own_metrics, OPERATOR, Entry(FLEET, _OWN, PLAIN)),
    Route("GET", OWN_LOAD, own_load, OPERATOR, Entry(FLEET, _OWN, "Load")),
    Route(
        "GET",
        "/fleet/audit",
        fleet_audit,
        OPERATOR,
        Entry(FLEET, "Every block, lease and request, for operators.", "FleetAudit"),
    ),
    Route("GET", OWN_STATUS, own_status, OPERATOR, Entry(FLEET, _OWN, "FleetStatus")),
    Route(
        "GET",
        STATUS,
        fleet_status,
        OPERATOR,
        Entry(FLEET, "Workers, blocks, queue and latencies, for operators.", "FleetStatus"),
    ),
    Route(
        "GET",
        OPENAPI,
        ServedDocument.answer,
        NONE,
        Entry(PAGES, "This document.", "Anything"),
        is_open_to_pages=True,
        part=RoutePart.DOCUMENT,
    ),
    Route("GET", "/", chat_page, NONE, Entry(PAGES, "The chat page.", PAGE), part=FILES),
    Route(
        "GET",
        "/dashboard",
        dashboard,
        NONE,
        Entry(PAGES, "A page that shows the fleet.", PAGE),
        part=FILES,
    ),
    Route(
        "GET",
        "/docs",
        api_page,
        NONE,
        Entry(PAGES, "A page that shows this document.", PAGE),
        part=FILES,
    ),
    Route(
        "GET",
        "/static/<path:name>",
        static_file,
        NONE,
        Entry(PAGES, "A file of the pages.", PAGE),
        part=FILES,
    ),
)
ROUTES: Final = RouteTable(ROWS, trees=("/v1/", "/api/"))

"""Error texts for API paths that official clients use and this server does not have."""

from __future__ import annotations

from typing import Final

_CONVERSATION: Final = (
    "conversations are not stored; send all turns to /v1/responses, or previous_response_id there"
)
_SPEECH: Final = "speech is not supported; send text to /v1/responses, also over a WebSocket"
_PICTURES: Final = "images and videos are not supported; send text to /v1/chat/completions"
_TOOLS: Final = (
    "the server runs no code or tools; offer functions to /v1/responses or /v1/messages and run "
    "them in your program"
)
_ACCOUNTS: Final = (
    "accounts are managed by the operator with triolet tenant; GET /v1/usage "
    "returns your key's limits and usage"
)
ABSENT: Final = {
    "/v1/v1": "the client adds /v1 by itself; give it the server's address without /v1",
    "/v1/messages/batches": "not supported; use /v1/batches with OpenAI's format",
    "/v1/complete": "this older endpoint is not supported; use POST /v1/messages",
    "/v1/chat/completions": "chat completions are not stored; keep the response of the POST",
    "/v1/conversations": _CONVERSATION,
    "/v1/threads": _CONVERSATION,
    "/v1/assistants": _CONVERSATION,
    "/v1/chatkit": _CONVERSATION,
    "/v1/moderations": "moderation is not supported; ask a model to judge texts, with "
    "response_format, at POST /v1/chat/completions",
    "/v1/decisions": "decisions are not supported; ask a model to judge texts, with "
    "response_format, at POST /v1/chat/completions",
    "/v1/uploads": "uploads in parts are not supported; POST /v1/files takes a whole file",
    "/v1/vector_stores": "vectors are not stored; store those of POST /v1/embeddings in your own "
    "database, and rank its results with POST /v1/rerank",
    "/v1/fine_tuning": "fine-tuning is not supported; the operator can add an adapter trained "
    "elsewhere, and requests name it as MODEL:ADAPTER",
    "/v1/evals": "evals are not supported; ask your questions with /v1/batches and grade the "
    "answers yourself",
    **dict.fromkeys(("/v1/audio", "/v1/realtime", "/v1/live"), _SPEECH),
    **dict.fromkeys(("/v1/images", "/v1/videos"), _PICTURES),
    **dict.fromkeys(
        (
            *("/v1/agents", "/v1/sessions", "/v1/environments", "/v1/deployments", "/v1/skills"),
            *("/v1/containers", "/v1/memory_stores", "/v1/vaults"),
        ),
        _TOOLS,
    ),
    **dict.fromkeys(
        ("/v1/organization", "/v1/organizations", "/v1/projects", "/v1/user_profiles"), _ACCOUNTS
    ),
    "/api/blobs": "models cannot be uploaded; the operator chooses the served models",
}
"""What to use instead, by path prefix. Longer prefixes come before shorter ones."""


def advice_on(path: str) -> str:
    """Return what to use instead of a path that does not exist."""
    usual = "the API is below /v1, the chat page at /"
    return next((ABSENT[one] for one in ABSENT if f"{path}/".startswith(f"{one}/")), usual)

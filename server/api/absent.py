"""Paths that official clients know and this server lacks, and what to use instead."""

from __future__ import annotations

from typing import Final

_CONVERSATION: Final = (
    "conversations are not stored; send all turns to /v1/responses, or previous_response_id there"
)
_SPEECH: Final = "no speech is read or made here; send text to /v1/responses, also over a WebSocket"
_PICTURES: Final = "no images or videos are read or made here; send text to /v1/chat/completions"
_TOOLS: Final = (
    "no code or tools are run here; offer functions to /v1/responses or /v1/messages and run them "
    "in your program"
)
_ACCOUNTS: Final = (
    "accounts are not managed here; the operator does that with triolet tenant, and GET /v1/usage "
    "has what your key may use and has used"
)
ABSENT: Final = {
    "/v1/v1": "the client adds /v1 by itself; give it the server's address without /v1",
    "/v1/messages/batches": "batches of messages are not taken; /v1/batches takes the OpenAI form",
    "/v1/complete": "this older form is not served; POST /v1/messages answers a conversation",
    "/v1/chat/completions": "chats are not stored; what the POST answers is all",
    "/v1/conversations": _CONVERSATION,
    "/v1/threads": _CONVERSATION,
    "/v1/assistants": _CONVERSATION,
    "/v1/chatkit": _CONVERSATION,
    "/v1/moderations": "texts are not moderated here; let a model judge them, with "
    "response_format, at POST /v1/chat/completions",
    "/v1/decisions": "texts are not judged here; let a model do it, with response_format, at POST "
    "/v1/chat/completions",
    "/v1/uploads": "files are not taken in parts; POST /v1/files takes a whole file",
    "/v1/vector_stores": "vectors are not stored; keep those of POST /v1/embeddings in a database "
    "of yours, and order what it finds with POST /v1/rerank",
    "/v1/fine_tuning": "models are not trained here; the operator adds an adapter that was trained "
    "elsewhere, and requests name it as MODEL:ADAPTER",
    "/v1/evals": "models are not graded here; ask your questions with /v1/batches and grade the "
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
    "/api/blobs": "models are not uploaded; the server answers with those that it was started with",
}
"""By the beginning of a path, longer ones first."""


def advice_on(path: str) -> str:
    """Return what to use instead of a path that is not there."""
    usual = "the API is below /v1, the chat page at /"
    return next((ABSENT[one] for one in ABSENT if f"{path}/".startswith(f"{one}/")), usual)

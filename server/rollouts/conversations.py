"""Whose request it is, and which versions a conversation began on: what routes assign by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..contract.generation import AssignedVersion

MAX_USER_CHARS: Final = 1024
"""Characters of a user's name or first turn that count. Hashing them takes microseconds, and users
that differ only later share a bucket, which is harmless."""
MAX_LOOKED: Final = 64
"""Turns among which the first one of the user is looked for, and tokens of a prompt of token ids.
Few conversations begin with more than a system prompt."""


@dataclass(slots=True)
class Conversation:
    """One request, or the requests of a WebSocket, which stay on the versions that they began on.

    Attributes:
      user: the user, in the tenant's words.
      named: the version that an operator names; empty for that of the route.
      is_from_here: whether it names one from this machine.
      assigned: the assigned version of each public name.
    """

    user: str
    named: str = ""
    is_from_here: bool = False
    assigned: dict[str, AssignedVersion] = field(default_factory=dict)


def named_user(body: Mapping[str, Any], session: str, *, is_messages: bool = False) -> str:
    """Return the user that a request names; empty if it names none.

    Args:
      body: the request's body, checked or not.
      session: the session that its headers name; empty for none.
      is_messages: whether it is of the Messages API, where `metadata` names the user; elsewhere
        clients keep notes of their own there.
    """
    metadata = body.get("metadata") if is_messages else None
    of_anthropic = metadata.get("user_id") if isinstance(metadata, dict) else None
    named = (body.get("user"), of_anthropic, body.get("safety_identifier"), session)
    return next((one for one in named if isinstance(one, str) and one), "")[:MAX_USER_CHARS]


def first_turn(body: Mapping[str, Any]) -> str:
    """Return the beginning of the first user turn, or of the prompt, query or first input: it stays
    the same while a conversation grows."""
    names = ("messages", "input", "prompt", "query", "text_1")
    found: Any = next((body[name] for name in names if name in body), "")
    while isinstance(found, list | dict) and found:
        if isinstance(found, dict):
            found = found.get("content") or found.get("text")
        elif isinstance(found[0], int):
            found = repr(found[:MAX_LOOKED])
        else:
            turns = (one for one in found[:MAX_LOOKED] if isinstance(one, dict))
            found = next((one for one in turns if one.get("role") == "user"), found[0])
    return found[:MAX_USER_CHARS] if isinstance(found, str) else ""
